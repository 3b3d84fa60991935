import type { PairReport } from "../report/report.js";
import { PAGE_SCRIPT } from "./html-script.js";
import { escapeXml, renderSvg } from "./render-svg.js";
import { renderText } from "./render-text.js";

const STYLE = `
body { font-family: sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid #ddd; }
.choices { display: flex; flex-wrap: wrap; gap: .3rem; }
button { border: 2px solid #888; border-radius: 4px; background: white; padding: .3rem .6rem; cursor: pointer; }
button[aria-pressed] { background: #222; color: white; }
.bar { position: relative; height: 2rem; background: repeating-linear-gradient(45deg, #eee 0 6px, #fff 6px 12px); border: 1px solid #888; }
.piece { position: absolute; top: 0; bottom: 0; outline: 1px solid white; }
pre { background: #f6f6f6; padding: 1rem; overflow: auto; }
`;

/** A self-contained page without network or storage access. It shows the sources of each rank and block that the reader picks. */
export function renderHtml(report: PairReport): string {
  // "</script>" in a name would end the element, and "<!--" change how the rest of it is read.
  const data = JSON.stringify(report).replaceAll("<", "\\u003c");
  const isPlanned = report.outcome === "planned";
  const explore = `<h2>Pick a rank</h2><div id="ranks" class="choices"></div><div id="detail"></div>
<script type="application/json" id="report">${data}</script><script>${PAGE_SCRIPT}</script>`;
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>${escapeXml(report.title)}</title>
<style>${STYLE}</style>
</head>
<body>
<h1>${escapeXml(report.title)}</h1>
${isPlanned ? `${renderSvg(report)}${explore}` : ""}
<h2>${isPlanned ? "The whole plan" : "Refused"}</h2>
<pre id="text">${escapeXml(renderText(report))}</pre>
</body>
</html>
`;
}
