import { KvError } from "@kv/interface";
import { escapeXml } from "../src/render/format.js";
import { reportBody } from "../src/render/render-html.js";
import { renderSvg } from "../src/render/render-svg.js";
import type { PairReport } from "../src/report/report.js";
import { sizeHtml } from "../src/size/render-size.js";
import { explore } from "./explore.js";
import {
  byFamily,
  FIELDS,
  fromFragment,
  optionsOf,
  type PageOptions,
  reportOf,
  sizesOf,
  toFragment,
} from "./planner-options.js";

// The planner page's script: plans and proves in the browser.

declare global {
  /** config.json of the known models by name, put here by the build. */
  const KNOWN_MODELS: Readonly<Record<string, unknown>>;
}

const element = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const form = element<HTMLFormElement>("form");
const field = (name: keyof PageOptions) => form.elements.namedItem(name) as HTMLInputElement;
let shown: PairReport | undefined;

for (const [family, names] of Object.entries(byFamily(KNOWN_MODELS))) {
  const group = document.createElement("optgroup");
  group.label = family;
  group.append(...names.map((name) => new Option(name, name)));
  element("model").append(group);
}

const read = () =>
  optionsOf((name) => (name === "permute" ? (field(name).checked ? "on" : "") : field(name).value));

function fill(options: PageOptions): void {
  for (const name of FIELDS) {
    if (name === "permute") field(name).checked = options[name] === "on";
    else field(name).value = options[name];
  }
}

function show(options: PageOptions): void {
  element("paste").hidden = options.model !== "";
  document.body.dataset["ready"] = "false";
  const result = element("result");
  element<HTMLButtonElement>("save-svg").disabled = true;
  try {
    shown = reportOf(options, KNOWN_MODELS);
    result.innerHTML = `<h2 id="title">${escapeXml(shown.title)}</h2>${reportBody(shown)}<h2>What fits into a decode GPU</h2>${whatFits(options)}`;
    explore(shown);
    element<HTMLButtonElement>("save-svg").disabled = false;
  } catch (thrown) {
    const { code, message, hint } = KvError.from(
      thrown,
      "KV_INTERNAL",
      "the pair could not be planned",
    );
    const advice = hint === undefined ? "" : `<p>${escapeXml(hint)}</p>`;
    result.innerHTML = `<p id="problem" role="alert"><strong>${escapeXml(message)}</strong> [${code}]</p>${advice}`;
    document.body.dataset["ready"] = "true";
  }
}

function whatFits(options: PageOptions): string {
  try {
    return sizeHtml(sizesOf(options, KNOWN_MODELS));
  } catch (thrown) {
    if (!KvError.is(thrown)) throw thrown;
    return `<p id="size">${escapeXml([thrown.message, thrown.hint].filter(Boolean).join("; "))}</p>`;
  }
}

function save(name: string, type: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  // The browser reads it after this event.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", () => {
  const options = read();
  history.replaceState(undefined, "", `#${toFragment(options)}`);
  show(options);
});
element("copy-link").addEventListener("click", async () => {
  const told = element("told");
  try {
    await navigator.clipboard.writeText(location.href);
    told.textContent = "The link is copied.";
  } catch {
    told.textContent = location.href;
  }
});
element("save-svg").addEventListener("click", () => {
  if (shown !== undefined) save("kv-plan.svg", "image/svg+xml", renderSvg(shown));
});
addEventListener("hashchange", start);

function start(): void {
  const options = fromFragment(location.hash);
  fill(options);
  show(options);
}
start();
