import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { readTransferConfig } from "@kv/connector";
import { builtProgram } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import { readPages } from "../site/pages.js";

const { pages } = readPages();
/**
 * The page of issue 26's configuration, and that of a connector whose sides are equal. vLLM warns
 * of the role too, and both pages say why they use it.
 */
const WITH_BOTH = ["docs/how-to/add-a-connector.md", "docs/how-to/run-on-neuron.md"];

/** The JSON object that begins here in a text; undefined where its braces do not close. */
function objectAt(text: string, from: number): string | undefined {
  let depth = 0;
  for (let at = from; at < text.length; at += 1) {
    if (text[at] === "{") depth += 1;
    if (text[at] === "}") depth -= 1;
    if (depth === 0) return text.slice(from, at + 1);
  }
  return undefined;
}

test("every kv_transfer_config of a page is one that our connectors take without a warning", () => {
  const configs = pages.flatMap(({ source, text }) =>
    Array.from(text.matchAll(/\{\s*"kv_connector"(?!: "OffloadingConnector")/g), ({ index }) => ({
      source,
      text: objectAt(text, index) ?? "",
    })),
  );
  expect(configs.length).toBeGreaterThan(8);
  const wrong: unknown[] = [];
  for (const { source, text } of configs) {
    const warn = (event: string, fields?: object) => {
      if (event !== "role-kv-both-is-deprecated" || !WITH_BOTH.includes(source))
        wrong.push({ source, event, ...fields });
    };
    const extraKeys = text.includes("FolderConnector") ? ["folder"] : [];
    try {
      readTransferConfig(text, { extraKeys, log: { debug() {}, info() {}, warn, error: warn } });
    } catch (error) {
      wrong.push({ source, text, error: String(error) });
    }
  }
  expect(wrong).toEqual([]);
});

test("every JSON block of a page is JSON, and kv-plan plans the file that its page shows", () => {
  const blocks = pages.flatMap(({ source, text }) =>
    Array.from(text.matchAll(/^```json\n([\s\S]*?)^```$/gm), ([, json = ""]) => ({ source, json })),
  );
  expect(blocks.length).toBeGreaterThan(2);
  for (const { source, json } of blocks) expect(() => JSON.parse(json), source).not.toThrow();
  const pair = blocks.find(
    ({ source, json }) => source === "docs/kv-plan.md" && json.includes('"prefill"'),
  );
  const file = join(scratchFolder(onTestFinished), "pair.json");
  writeFileSync(file, pair?.json ?? "");
  const args = [builtProgram("kv-plan"), "--file", file];
  const planned = spawnSync(process.execPath, args, { encoding: "utf8" });
  expect(planned.stderr).toBe("");
  expect(planned.status).toBe(0);
  expect(planned.stdout).toMatch(/proven/);
});
