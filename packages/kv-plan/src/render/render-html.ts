import type { PairReport } from "../report/report.js";
import { escapeXml, showBytes } from "./format.js";
import { postingLines } from "./posting-lines.js";
import { renderSvg } from "./render-svg.js";
import { renderText } from "./render-text.js";

/** Two workers, and the cache on its way. */
export const ICON_SVG =
  '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="#3b82c4"><path d="M1 2h4v12H1zM11 2h4v12h-4zM6 7h2V5l2 3-2 3V9H6z"/></svg>';
export const ICON_URL = `data:image/svg+xml,${encodeURIComponent(ICON_SVG)}`;

/** Colours follow the reader's choice of dark or light. */
const PAGE_STYLE = `
:root { color-scheme: light dark; --ink: #1f2328; --soft: #57606a; --paper: #ffffff; --field: #f3f4f6; --line: #c8ced6; --accent: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #a5b0bc; --paper: #0d1117; --field: #1a212b; --line: #3b4552; --accent: #79b8ff; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { font: 15px/1.5 sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; } h3 { font-size: 1rem; }
.kv-plan { display: block; width: 100%; height: auto; }
.narrow { display: none; }
@media (max-width: 600px) { .wide { display: none; } .narrow { display: block; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; overflow-wrap: normal; }
th, td { text-align: right; padding: .15rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
.choices { display: flex; flex-wrap: wrap; gap: .3rem; }
button { font: inherit; color: inherit; border: 2px solid var(--line); border-radius: 5px; background: var(--paper); padding: .3rem .6rem; cursor: pointer; }
button[aria-pressed=true] { background: var(--ink); color: var(--paper); }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.bar { position: relative; height: 2rem; background: repeating-linear-gradient(45deg, var(--field) 0 6px, var(--paper) 6px 12px); border: 1px solid var(--line); }
.piece { position: absolute; top: 0; bottom: 0; outline: 1px solid var(--paper); }
pre { background: var(--field); padding: 1rem; overflow-x: auto; overflow-wrap: normal; white-space: pre-wrap; }
@media (max-width: 600px) { pre { white-space: pre; } }
`;

/**
 * The picture, the ranks to pick, and the whole report as text. The page's script makes it
 * interactive.
 */
export function reportBody(report: PairReport): string {
  const whole = `<pre id="text" tabindex="0">${escapeXml(renderText(report))}</pre>`;
  if (report.outcome === "refused") {
    const changes = report.wouldWork.map((change) => `<li>${escapeXml(change)}</li>`).join("");
    return (
      `<h2>Refused</h2><p id="reason">${escapeXml(report.reason)}</p>${report.hint === null ? "" : `<p>${escapeXml(report.hint)}</p>`}` +
      `${changes === "" ? "" : `<p>With one of these changes the pair has a plan:</p><ul id="changes">${changes}</ul>`}<h2>The report</h2>${whole}`
    );
  }
  const { proof, request } = report;
  const verdict = proof.proven
    ? "Proven: every byte of the request arrives once, at its place."
    : `NOT PROVEN: ${proof.fault.message}`;
  return (
    `<p id="bytes">${showBytes(request.lengthBytes)} for ${request.numTokens} tokens. The rank with most takes ${Number(request.transferMs.toPrecision(3))} ms at ${request.bandwidthGBps} GB/s.</p>` +
    `<ul id="posting">${postingLines(report.posting)
      .map((line) => `<li>${escapeXml(line)}</li>`)
      .join("")}</ul>` +
    `<p id="verdict"><strong>${escapeXml(verdict)}</strong></p>` +
    report.tiers.map((page) => `<p id="tiers">Offloading tiers: ${escapeXml(page)}.</p>`).join("") +
    report.refusedByVllm
      .map((reason) => `<p class="advice">Not for a vLLM decode worker: ${escapeXml(reason)}</p>`)
      .join("") +
    `<div class="wide">${renderSvg(report, { titled: false })}</div>` +
    `<div class="narrow">${renderSvg(report, { titled: false, shape: "narrow" })}</div>` +
    `<h2>Pick a rank</h2><div id="ranks" class="choices"></div><div id="detail" aria-live="polite"></div>` +
    `<h2>The whole plan</h2>${whole}`
  );
}

/**
 * A self-contained page without network or storage access. `script`: the bundle of
 * page/report-page.ts.
 */
export function renderHtml(report: PairReport, script: string): string {
  // In a name, "</script>" would end the element and "<!--" change its parsing.
  const data = JSON.stringify(report).replaceAll("<", "\\u003c");
  const body = `<h1>${escapeXml(report.title)}</h1>
${reportBody(report)}
<script type="application/json" id="report">${data}</script>`;
  return htmlPage(report.title, body, script);
}

/** A page with one script that may load nothing. */
export function htmlPage(title: string, body: string, script: string): string {
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>${escapeXml(title)}</title>
<link rel="icon" href="${ICON_URL}">
<style>${PAGE_STYLE}</style>
</head>
<body>
${body}
<script>${script.replaceAll("</script", "<\\/script")}</script>
</body>
</html>
`;
}
