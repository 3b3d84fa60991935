import { inBrowser, withBase } from "vitepress";
import theme from "vitepress/theme";
import "./style.css";

// The theme of the site: VitePress' own, which draws Mermaid diagrams in the reader's browser, in
// light or in dark colours.
let mermaid;
/** Mermaid's script, which only pages with a diagram load. */
const loadMermaid = () =>
  new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = withBase("/mermaid.js");
    script.onload = () => resolve(globalThis.mermaid);
    script.onerror = reject;
    document.head.append(script);
  });

async function drawDiagrams() {
  const diagrams = [...document.querySelectorAll("pre.mermaid")];
  if (diagrams.length === 0) return;
  mermaid ??= loadMermaid();
  const { initialize, run } = await mermaid;
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const asDrawn = { useMaxWidth: false };
  initialize({
    startOnLoad: false,
    theme: isDark ? "dark" : "neutral",
    flowchart: asDrawn,
    sequence: asDrawn,
    state: asDrawn,
  });
  for (const diagram of diagrams) {
    diagram.dataset.text ??= diagram.textContent;
    diagram.textContent = diagram.dataset.text;
    delete diagram.dataset.processed;
  }
  await run({ nodes: diagrams });
}

export default {
  extends: theme,
  enhanceApp({ router }) {
    if (!inBrowser) return;
    router.onAfterRouteChange = () => void setTimeout(drawDiagrams);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawDiagrams);
  },
};
