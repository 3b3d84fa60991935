// npm run test:runtimes [-- node-22,bun]: reads memory of another agent with the built @kv/nixl in
// each runtime, which the npm packages node, bun and deno bring.
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const RUNTIMES: Readonly<Record<string, { npm: string; command: readonly string[] }>> = {
  "node-20": { npm: "node@20", command: ["node"] },
  "node-22": { npm: "node@22", command: ["node"] },
  "node-24": { npm: "node@24", command: ["node"] },
  "node-26": { npm: "node@26", command: ["node"] },
  bun: { npm: "bun@1", command: ["bun"] },
  deno: { npm: "deno@2", command: ["deno", "run", "--allow-all", "--node-modules-dir=manual"] },
};
const PACKAGE = fileURLToPath(new URL("../../packages/nixl/", import.meta.url));
const PROGRAM = `
  import { nixlTransport } from ${JSON.stringify(`${PACKAGE}dist/index.js`)};
  const transport = nixlTransport();
  const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
  const [target, source] = [transport.allocate(65536), transport.allocate(65536)];
  source.bytes.fill(7);
  await reader.register(target);
  await owner.register(source);
  await reader.addRemote(await owner.localMetadata());
  const rows = (address) => ({ memoryType: "DRAM", rows: Float64Array.of(address, 4096, 0, 4096, 16) });
  const local = await reader.prepareLocal(rows(target.address));
  const remote = await reader.prepareRemote(owner.name, rows(source.address));
  const ids = Int32Array.from({ length: 16 }, (_, index) => index);
  await reader.transfer({ operation: "READ", local, localIds: ids, remote, remoteIds: ids }).done;
  await reader.notify(owner.name, new Uint8Array([1]));
  for await (const { payload } of owner.notifications()) { if (payload[0] !== 1) throw new Error("wrong bytes"); break; }
  await transport.close();
  if (target.bytes.some((byte) => byte !== 7)) throw new Error("wrong bytes");
  console.log("read");
`;

/** Runs the program in each of these runtimes, all by default. Returns what went wrong. */
export function runtimeProblems(names: readonly string[] = Object.keys(RUNTIMES)): string[] {
  return names.flatMap((name) => {
    const runtime = RUNTIMES[name];
    if (runtime === undefined) return [`${name} is not one of ${Object.keys(RUNTIMES).join(", ")}`];
    const folder = mkdtempSync(join(tmpdir(), "kv-runtime-"));
    try {
      const file = join(folder, "read.mjs");
      writeFileSync(file, PROGRAM);
      const npm = [
        "install",
        "--no-save",
        "--ignore-scripts=false",
        "--no-audit",
        "--no-fund",
        "--prefix",
        folder,
        runtime.npm,
      ];
      const installed = spawnSync("npm", npm, { encoding: "utf8" });
      if (installed.status !== 0) return [`${name} could not be installed: ${installed.stderr}`];
      const [command = "", ...args] = runtime.command;
      // Deno finds the package's dependencies from the folder that it runs in.
      const options = { encoding: "utf8", timeout: 60_000, cwd: PACKAGE } as const;
      const program = join(folder, "node_modules/.bin", command);
      const { status, stdout, stderr } = spawnSync(program, [...args, file], options);
      return status === 0 && stdout.endsWith("read\n")
        ? []
        : [`${name} ended with ${status}: ${stderr}`];
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const problems = runtimeProblems(process.argv[2]?.split(","));
  for (const problem of problems) console.error(problem);
  process.exitCode = problems.length === 0 ? 0 : 1;
}
