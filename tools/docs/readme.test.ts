import { execFile } from "node:child_process";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import ts from "typescript";
import { expect, test } from "vitest";
import { etcdMissing, skipsEtcd, startEtcd } from "../../packages/nixl/test/support/etcd.js";
import { nixlMissing } from "../../packages/nixl/test/support/nixl-available.js";

/**
 * Type-checks and runs the examples of the packages' READMEs. Each must print the output that its comments show (`console.log(…); // output`).
 * Examples that need hardware or servers are only type-checked.
 */
const run = promisify(execFile);
const root = fileURLToPath(new URL("../../", import.meta.url));
const out = join(root, "build/readme");

/** Examples that are only type-checked: the reason, and declarations of the names that the page assumes. */
const NOT_RUN: Readonly<Record<string, { why: string; declarations?: string }>> = {
  "conformance-1": { why: "suites run only inside vitest; the packages' tests run them" },
  "nixl-3": {
    why: "needs a GPU, and an engine that has allocated on it",
    declarations: [
      'declare const agent: import("@kv/interface").Agent;',
      "declare const BLOCK: number;",
      "declare const peerName: string;",
      "declare const peerRows: Float64Array;",
      "declare const localIds: Int32Array;",
      "declare const remoteIds: Int32Array;",
    ].join("\n"),
  },
  "plan-1": {
    why: "its input is the result of a handshake",
    declarations: [
      'declare const local: import("@kv/plan").RankGeometry;',
      'declare const remotes: import("@kv/plan").RankGeometry[];',
      "declare const regionBytes: readonly Uint8Array[];",
    ].join("\n"),
  },
  "proxy-1": { why: "needs prefill and decode servers" },
};

const published = readdirSync(join(root, "packages")).filter((name) => {
  const manifest = readFileSync(join(root, "packages", name, "package.json"), "utf8");
  return (JSON.parse(manifest) as { private?: boolean }).private !== true;
});

const examples = published.flatMap((name) => {
  const text = readFileSync(join(root, "packages", name, "README.md"), "utf8");
  return Array.from(text.matchAll(/^```ts\n([\s\S]*?)^```$/gm), ([, code = ""], index) => {
    const id = `${name}-${index + 1}`;
    const declarations = NOT_RUN[id]?.declarations ?? "";
    return { id, code, file: join(out, `${id}.ts`), source: `${declarations}\n${code}\nexport {};\n` };
  });
});
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
for (const { file, source } of examples) writeFileSync(file, source);

test("every published package has a README with an example, and every exception is an example that exists", () => {
  const names = new Set(examples.map(({ id }) => id.replace(/-\d+$/, "")));
  expect(published.filter((name) => !names.has(name))).toEqual([]);
  expect(Object.keys(NOT_RUN).filter((id) => !examples.some((example) => example.id === id))).toEqual([]);
});

test("the examples type-check", { timeout: 240_000 }, () => {
  const files = examples.map(({ file }) => file);
  const { config } = ts.readConfigFile(join(root, "tsconfig.json"), ts.sys.readFile) as { config: object };
  const { options } = ts.parseJsonConfigFileContent({ ...config, include: [], files }, ts.sys, root);
  // An example may declare a name and leave its use to the reader.
  const found = ts.getPreEmitDiagnostics(
    ts.createProgram(files, { ...options, noUnusedLocals: false, noUnusedParameters: false }),
  );
  const errors = found
    .filter(({ file }) => file === undefined || files.includes(file.fileName))
    .map(
      ({ file, messageText }) => `${file?.fileName}: ${ts.flattenDiagnosticMessageText(messageText, "\n")}`,
    );
  expect(errors).toEqual([]);
});

/** Examples that need a real NIXL, and the one that needs etcd as well. */
const NEED_NIXL = examples.filter(({ id }) => id.startsWith("nixl-")).map(({ id }) => id);
const NEEDS_ETCD = "nixl-8";
const missingFor = (id: string): string | undefined => {
  if (NEED_NIXL.includes(id) && nixlMissing !== undefined) return nixlMissing;
  return id === NEEDS_ETCD && skipsEtcd ? etcdMissing : undefined;
};
const runnable = examples
  .filter(({ id }) => NOT_RUN[id] === undefined)
  .map((example) => ({ ...example, missing: missingFor(example.id) }));
for (const { id, file, code, missing } of runnable) {
  test.skipIf(missing)(
    `README example ${id} runs and prints the output that its comments show (${missing ?? "found"})`,
    async () => {
      const expected = Array.from(code.matchAll(/\bconsole\.log\(.*\); \/\/ (.*)$/gm), ([, text]) => text);
      const etcd = id === NEEDS_ETCD ? await startEtcd() : undefined;
      const env = { ...process.env, ...(etcd && { NIXL_ETCD_ENDPOINTS: etcd.url }) };
      try {
        const { stdout } = await run(process.execPath, ["--import", "tsx", file], { cwd: root, env });
        const printed = stdout.split("\n");
        for (const line of expected) expect(printed).toContain(line);
      } finally {
        await etcd?.end();
      }
    },
  );
}
