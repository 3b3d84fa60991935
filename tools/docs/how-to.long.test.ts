// A long suite: runs each example of the how-to pages; the READMEs' examples run in npm test.

import { readdirSync } from "node:fs";
import { join } from "node:path";
import { jsonLog } from "@kv/fleet/front-end";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, onTestFinished, test } from "vitest";
import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import { createCommand, type DemoFlags } from "../../apps/demo/src/command-line.js";
import { fetchRecords } from "../../apps/demo/src/run/check-run.js";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { prepareRun } from "../../apps/demo/src/run/prepare-run.js";
import { HOW_TOS, packageFiles, packageOf, textOf } from "./how-to-pages.js";
import { compileErrors } from "./readme-examples.js";

/** The packages of the how-to pages: type-checks them, runs their tests, and runs the demo on them. */

const followed = HOW_TOS.map((howTo) => {
  const folder = packageOf(howTo.page);
  const files = packageFiles(howTo.page);
  const sources = files.filter((path) => path.endsWith(".ts")).map((path) => join(folder, path));
  return { ...howTo, files, sources, source: join(folder, "src", `${howTo.module}.ts`) };
});

test("the packages of the pages type-check", { timeout: 240_000 }, () => {
  expect(compileErrors(followed.flatMap(({ sources }) => sources))).toEqual([]);
});

describe.each(followed)("docs/how-to: $page", async ({ page, files, sources }) => {
  test("the page names each source file and each test of its package", () => {
    const text = textOf(page);
    const named = files.filter((path) => text.includes(`examples/${page}/${path}`));
    expect(named.length).toBeGreaterThan(1);
    expect(files.filter((path) => !named.includes(path) && !/^[\w.]+$/.test(path))).toEqual([]);
  });
  for (const path of sources.filter((source) => source.endsWith(".test.ts"))) await import(path);
});

/** The demo's options of a command line. */
async function flagsOf(args: readonly string[]): Promise<DemoFlags> {
  let flags: DemoFlags | undefined;
  const other = async () => {};
  const demo = async (given: DemoFlags) => {
    flags = given;
  };
  await createCommand({
    demo,
    accuracy: other,
    instance: other,
    proxy: other,
  }).parseAsync([...args], {
    from: "user",
  });
  if (flags === undefined) throw new Error(`not the demo's options: ${args.join(" ")}`);
  return flags;
}

test.each(followed)(
  "the package of docs/how-to/$page runs in the demo, behind the proxy",
  {
    timeout: 120_000,
  },
  async ({ demo, source }) => {
    const folder = scratchFolder(onTestFinished);
    const { prompts, expected } = await prepareRun({ requests: 4, maxTokens: 8 }, () => {});
    const flags = await flagsOf(["--prefills", "2", "--decodes", "2", ...demo(source, folder)]);
    await using cluster = await startCluster(
      {
        ...flags,
        transport: flags.transportModule === undefined ? "memory" : "module",
        cacheTokens: 4096,
      },
      { log: jsonLog("error", process.stderr), logLevel: "error" },
    );
    const { url } = cluster.proxy;
    const outcomes = await Promise.all(
      prompts.map((promptTokens, i) =>
        complete({ url, requestId: `r${i}`, promptTokens, maxTokens: 8 }),
      ),
    );
    expect(outcomes.map(({ tokens }) => tokens)).toEqual(expected);
    const records = await Promise.all(cluster.decodes.map((decode) => fetchRecords(decode.url)));
    expect(records.flat().filter(({ direction }) => direction === "received")).toHaveLength(
      prompts.length,
    );
    expect(readdirSync(folder)).toEqual([]);
  },
);
