// What charts on a canvas share.
//
//   prepared(canvas, width, height) -> a pen for a clean canvas of so many CSS pixels, in the page's font
//   onLook(box, draw)    calls *draw* when the box has another size, or the page another theme
//   nice(number)         the next larger one of 1, 2, 5, 10, 20, 50 ..; also 0.5, 0.2 ..

export function prepared(canvas, width, height) {
  const dense = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * dense) || canvas.height !== Math.round(height * dense)) {
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  return pen;
}

export function onLook(box, draw) {
  new ResizeObserver(draw).observe(box);
  addEventListener("themechange", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

export function nice(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return power * [1, 2, 5, 10].find(times => times * power >= number);
}
