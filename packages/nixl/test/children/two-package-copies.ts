// Two copies of the package, each with its own addon and interface, as when two dependencies of an
// application need different versions.
import { copyFile, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { build } from "esbuild";
import { codeOf } from "../support/code-of.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

type Copy = typeof import("@kv/nixl");
const LENGTH = 1 << 20;
const root = process.cwd();
const folder = await mkdtemp(join(tmpdir(), "kv-nixl-copies-"));

async function copy(name: string): Promise<Copy> {
  const [dist, addon] = [
    join(folder, name, "packages/nixl/dist"),
    join(folder, name, "native/build"),
  ];
  await mkdir(addon, { recursive: true });
  await copyFile(join(root, "native/build/kv_nixl.node"), join(addon, "kv_nixl.node"));
  // By this file the package knows a checkout, whose addon it takes.
  await writeFile(join(folder, name, "native/build.mjs"), "");
  await build({
    entryPoints: [join(root, "packages/nixl/src/index.ts")],
    outdir: dist,
    bundle: true,
    format: "esm",
    platform: "node",
    target: "node20",
    logLevel: "error",
  });
  return (await import(pathToFileURL(join(dist, "index.js")).href)) as Copy;
}

async function agentOf({ nixlTransport }: Copy) {
  const transport = nixlTransport();
  const [agent, memory] = [await transport.createAgent(), transport.allocate(LENGTH)];
  await agent.register(memory);
  return { transport, agent, memory };
}

const expect = (found: unknown, wanted: unknown) => {
  if (found !== wanted) throw new Error(`${String(found)} instead of ${String(wanted)}`);
};

const [first, second] = [await copy("first"), await copy("second")];
if (first.nixlTransport === second.nixlTransport) throw new Error("there is one copy, not two");
const [reader, owner] = [await agentOf(first), await agentOf(second)];
owner.memory.bytes.fill(9);
await reader.agent.addRemote(await owner.agent.localMetadata());
const { name } = owner.agent;
const { local, remote, move } = await listsOf(
  reader.agent,
  reader.memory,
  name,
  owner.memory,
  LENGTH,
  1,
);
await move("READ", scattered(1), { notification: Buffer.from("read") }).done;
expect(reader.memory.bytes[LENGTH - 1], 9);
for await (const { from } of owner.agent.notifications()) {
  expect(from, reader.agent.name);
  break;
}
// Both addons are loaded, so their files are no longer needed.
await rm(folder, { recursive: true });
// Each copy refuses the other's objects.
expect(await codeOf(reader.agent.register(owner.memory)), "KV_MEMORY_INVALID");
const runs = Int32Array.of(0, 0, 1);
const foreign = async () => owner.agent.transfer({ operation: "READ", local, remote, runs }).done;
expect(await codeOf(foreign()), "KV_TRANSFER_INVALID");
await owner.transport.close();
// The other copy works on, and is left open when the process exits.
expect((await reader.agent.localMetadata()).length > 0, true);
process.stdout.write("moved");
