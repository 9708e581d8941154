// Runs before the page is drawn: applies the theme that the user chose, so that nothing flashes. Not a module for that
// reason. js/frame.js has the switch. Without a choice the system decides.
{
  let theme = null;
  try {
    theme = localStorage.getItem("minisgl.theme");
  } catch {
    /* storage is off: the system decides */
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
