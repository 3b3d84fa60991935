import { execFile } from "node:child_process";
import { cpSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { promisify } from "node:util";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import { runKvPeer } from "../../packages/peer/test/run-kv-peer.js";
import { serveSample } from "../../packages/peer/test/served.js";
import { root } from "../repository/source-files.js";
import { readPages } from "../site/pages.js";
import { expectShown } from "./expect-shown.js";
import { nodeArguments } from "./page-commands.js";
import { isShown, masked, pageOutputs } from "./page-outputs.js";

// Each output that a page shows is compared with what its command prints. `npx vitest run
// tools/docs/outputs.test.ts -u` writes the pages. `npm run release:rehearse` runs the examples
// where the packages are installed.
const outputs = pageOutputs(readPages().pages);

/** What stands for the servers, or the sources of vLLM, that a command needs. */
const STAND_INS: Readonly<Record<string, () => Promise<string>>> = {
  "kv-peer doctor": async () => {
    const prefill = await serveSample({ sideChannelHost: "localhost" });
    const decode = await serveSample({ factors: { dtype: "torch.bfloat16" } });
    // An address that is not one of the loopback, and leads there.
    const p = prefill.server.url.replace("127.0.0.1", "0.0.0.0");
    return (await runKvPeer(`doctor --prefill ${p} --decode ${decode.server.url} --no-bytes`))
      .stdout;
  },
  "kv-peer wire": async () => {
    const tree = scratchFolder(onTestFinished);
    cpSync(join(root, "packages/peer/test/fixtures/vllm-tree"), tree, { recursive: true });
    const change = (path: string, changes: Readonly<Record<string, string>>) => {
      const file = join(tree, "vllm", path);
      const text = Object.entries(changes).reduce(
        (before, [from, to]) => before.replace(from, to),
        readFileSync(file, "utf8"),
      );
      writeFileSync(file, text);
    };
    change("_version.py", { "0.33.0": "0.34.0" });
    change("distributed/kv_transfer/kv_connector/v1/nixl/metadata.py", {
      "VERSION: int = 15": "VERSION: int = 16",
      "block_strides:": "block_step_bytes:",
    });
    return (await runKvPeer(`wire ${tree}`)).stdout;
  },
};

/** The suites that compare the outputs of a page in a deployment. */
const ELSEWHERE: Readonly<Record<string, string>> = {
  "docs/operate/verify.md": "apps/demo/test/verify-nixl.long.test.ts",
};

for (const output of outputs.filter(({ page }) => ELSEWHERE[page] === undefined)) {
  const { page, line, needs } = output;
  const [, standIn] = Object.entries(STAND_INS).find(([name]) => line.includes(`${name} `)) ?? [];
  const missing = needs === "Needs NIXL." ? nixlMissing : undefined;

  test.skipIf(missing)(`${page} shows what ${line} prints (${missing ?? "found"})`, async () => {
    if (standIn !== undefined) return expectShown(output, await standIn(), masked);
    const args = nodeArguments(line);
    if (args === undefined) return expect.fail(`"${line}" is no program of ours`);
    const { stdout } = await promisify(execFile)(process.execPath, args, { cwd: root });
    return expectShown(output, stdout);
  });
}

test.each(Object.entries(ELSEWHERE))("%s has outputs, and %s compares them", (page, suite) => {
  expect(outputs.map((output) => output.page)).toContain(page);
  expect(readFileSync(join(root, suite), "utf8")).toContain(page);
});

test("each example has a page that shows what it prints", () => {
  const examples = readdirSync(join(root, "examples")).filter(
    (name) => /\.[cm]js$/.test(name) && name !== "engine.mjs",
  );
  const shown = outputs.map(({ line }) => line);
  expect(examples.filter((name) => !shown.includes(`node examples/${name}`))).toEqual([]);
});

test.each([
  ["one\ntwo\n", "one\n2\n", false],
  ["one\n", "one\ntwo\n", false],
  ["one\n…\n", "one\ntwo\nthree\n", true],
  ["…\nfour\n", "one\nfour\nfive\n", false],
  ["at … ms\n", "at 0.3 ms\n", true],
])("%j shows %j: %s", (text, printed, expected) => {
  expect(isShown(text, printed)).toBe(expected);
});

test("ports, times and the widths of columns may differ, words may not", () => {
  const shown = "ok    HTTP  http://p1:8000 is healthy, after 0.1 s\n";
  expect(isShown(shown, "ok  HTTP http://127.0.0.1:43 is healthy, after 12 s\n", masked)).toBe(
    true,
  );
  expect(isShown(shown, "ok  HTTP http://127.0.0.1:43 is sick, after 12 s\n", masked)).toBe(false);
});
