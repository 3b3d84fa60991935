import { htmlPage } from "../src/render/render-html.js";

const STYLE = `
form { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .6rem .8rem; align-items: end; }
label { display: block; font-size: .85rem; color: var(--soft); }
input, select, textarea { display: block; width: 100%; font: inherit; color: var(--ink); background: var(--field); border: 1px solid var(--line); border-radius: 5px; padding: .35rem .5rem; }
input:not([type=checkbox]), select { height: 2.3rem; }
input[type=checkbox] { display: inline; width: auto; }
.whole { grid-column: 1 / -1; }
textarea { font-family: monospace; font-size: .8rem; }
#problem { border-left: 4px solid #c0362c; padding-left: .7rem; }
.soft { color: var(--soft); font-size: .9rem; }
`;

const input = (name: string, label: string, rest = "") =>
  `<label>${label}<input name="${name}" autocomplete="off" spellcheck="false" ${rest}></label>`;

/** `script` is the bundle of planner.ts. */
export function plannerHtml(script: string): string {
  return htmlPage(
    "kv-plan",
    `<style>${STYLE}</style>
<h1>kv-plan: who reads which KV cache</h1>
<p class="soft">Plans how the ranks of a vLLM decode server read the KV cache of a prefill server, and proves the plan. Everything is computed in this page; nothing is sent.
Where prefill and decode differ, write two values: <code>8,4</code> is TP 8 for prefill and TP 4 for decode.</p>
<form id="form">
<label>Model<select id="model" name="model"><option value="">paste a config.json</option></select></label>
${input("tp", "TP size", 'inputmode="numeric" placeholder="1"')}
${input("block", "Block size, tokens", 'inputmode="numeric" placeholder="16"')}
${input("layout", "Layout", 'placeholder="HND" list="layouts"')}
${input("pp", "PP stages of prefill", 'inputmode="numeric" placeholder="1"')}
${input("backend", "Attention backend", 'placeholder="FLASH_ATTN"')}
<label>KV cache dtype<select name="dtype"><option>auto</option><option>bfloat16</option><option>float16</option><option>fp8</option></select></label>
${input("tokens", "Tokens of the request", 'inputmode="numeric"')}
${input("computed", "Prefix hit, decode blocks", 'inputmode="numeric"')}
${input("bandwidth", "Link of a rank, GB/s", 'inputmode="decimal"')}
${input("memory", "Memory of a GPU, GiB", 'inputmode="numeric"')}
${input("weights", "Weights, GiB", 'inputmode="numeric" placeholder="estimated"')}
<label class="whole"><input type="checkbox" name="permute"> the decode engine may convert HND to NHD (vLLM: <code>enable_permute_local_kv</code>)</label>
<label class="whole" id="paste">config.json from Hugging Face<textarea name="config" rows="8" spellcheck="false"></textarea></label>
<datalist id="layouts"><option>HND</option><option>NHD</option></datalist>
<div class="whole choices"><button type="button" id="copy-link">Copy link</button><button type="button" id="save-svg">Save picture (SVG)</button></div>
</form>
<p id="told" class="soft" role="status"></p>
<main id="result"></main>`,
    script,
  );
}
