import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";
import { describe, expect, test } from "vitest";
import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import { jsonLog } from "../../apps/demo/src/processes/json-log.js";
import { fetchRecords } from "../../apps/demo/src/run/compare-kv.js";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { prepareRun } from "../../apps/demo/src/run/prepare-run.js";

/** Follows the how-to pages: writes out their files as a reader would, type-checks them, and runs their tests. */
const root = fileURLToPath(new URL("../../", import.meta.url));
const PAGES = ["add-a-connector", "add-a-platform", "add-a-transport"];

/** The files of a page. Each is a line with the path in bold code, an empty line, and a fenced block. */
function filesOf(text: string): Map<string, string> {
  const blocks = text.matchAll(/^\*\*`([\w./-]+)`\*\*\n\n```\w+\n([\s\S]*?)^```$/gm);
  return new Map(Array.from(blocks, ([, path = "", content = ""]) => [path, content]));
}

/** The compiler's errors in the files, with this repository's settings. */
function compileErrors(paths: readonly string[]): string[] {
  const { config } = ts.readConfigFile(join(root, "tsconfig.json"), ts.sys.readFile) as { config: object };
  const { options } = ts.parseJsonConfigFileContent({ ...config, include: [], files: paths }, ts.sys, root);
  const found = ts.getPreEmitDiagnostics(ts.createProgram(paths, options));
  return found
    .filter(({ file }) => file === undefined || paths.includes(file.fileName))
    .map(
      ({ file, messageText }) => `${file?.fileName}: ${ts.flattenDiagnosticMessageText(messageText, "\n")}`,
    );
}

const followed = PAGES.map((page) => {
  const folder = join(root, "build/how-to", page);
  const text = readFileSync(join(root, "docs/how-to", `${page}.md`), "utf8");
  const files = filesOf(text);
  rmSync(folder, { recursive: true, force: true });
  for (const [path, content] of files) {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    writeFileSync(join(folder, path), content);
  }
  const sources = [...files.keys()].filter((path) => path.endsWith(".ts")).map((path) => join(folder, path));
  return { page, text, files, sources };
});

test("the files of the pages type-check", { timeout: 240_000 }, () => {
  expect(compileErrors(followed.flatMap(({ sources }) => sources))).toEqual([]);
});

describe.each(followed)("docs/how-to: $page", async ({ text, files, sources }) => {
  test("every fenced block is a file that is tested here", () => {
    const fences = text.match(/^```(?!mermaid)\w+$/gm) ?? [];
    expect(files.size).toBeGreaterThan(0);
    expect(fences.length).toBe(files.size);
  });
  for (const path of sources.filter((source) => source.endsWith(".test.ts"))) await import(path);
});

test("the connector of docs/how-to/add-a-connector runs in the demo, behind the proxy", {
  timeout: 120_000,
}, async () => {
  const folder = mkdtempSync(join(tmpdir(), "kv-folder-"));
  const { prompts, expected } = await prepareRun({ requests: 4, maxTokens: 8 }, () => {});
  const sides = {
    prefills: 2,
    decodes: 2,
    prefillTp: 2,
    decodeTp: 2,
    prefillBlockSize: 16,
    decodeBlockSize: 16,
  };
  const cluster = await startCluster(
    {
      ...sides,
      transport: "memory",
      connector: "FolderConnector",
      connectorModule: join(root, "build/how-to/add-a-connector/src/index.ts"),
      extraConfig: { folder },
      cacheTokens: 4096,
    },
    { log: jsonLog("error"), logLevel: "error" },
  );
  try {
    const { url } = cluster.proxy;
    const outcomes = await Promise.all(
      prompts.map((promptTokens, i) => complete({ url, requestId: `r${i}`, promptTokens, maxTokens: 8 })),
    );
    expect(outcomes.map(({ tokens }) => tokens)).toEqual(expected);
    const records = await Promise.all(cluster.decodes.map((decode) => fetchRecords(decode.url)));
    expect(records.flat().filter(({ direction }) => direction === "received")).toHaveLength(prompts.length);
    expect(readdirSync(folder)).toEqual([]);
  } finally {
    await cluster.close();
    rmSync(folder, { recursive: true });
  }
});
