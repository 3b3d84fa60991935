// npm run test:sanitize [-- --short]: the addon built with ASan and UBSan, under its tests, against the stand-in for NIXL and against
// the real library. A finding ends the process that made it, and so fails the test. --short: of the real library's
// tests the traps alone; npm test runs it so with CI=true.
import { spawn, spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { root, run, setup } from "./setup.mjs";

const short = process.argv.includes("--short");
const compiler = process.env.CXX ?? "g++";

/** The sanitizers' libraries must come before all others, and Node is not linked to them. */
function library(name) {
  const path = spawnSync(compiler, [`-print-file-name=${name}`], { encoding: "utf8" }).stdout?.trim();
  if (path && path !== name && existsSync(path)) return path;
  console.error(`${compiler} has no ${name}: install its sanitizers, such as: apt-get install g++`);
  process.exit(1);
}

const { nixl } = await setup();
await run("node", [join(root, "native/build.mjs"), "--sanitize"], { show: true });
const folder = join(root, "native/build/sanitize");
const env = {
  ...process.env,
  LD_PRELOAD: ["libasan.so", "libubsan.so"].map(library).join(" "),
  // Node and NIXL leave at exit what they have; an error ends the process.
  ASAN_OPTIONS: "detect_leaks=0:abort_on_error=1:new_delete_type_mismatch=0",
  UBSAN_OPTIONS: "print_stacktrace=1:halt_on_error=1",
  KV_NIXL_ADDON: join(folder, "kv_nixl.node"),
  KV_FAKE_NIXL: join(folder, "libfake_nixl_capi.so"),
};
const standIn = [
  "transfer/conformance-fake",
  "memory/cuda-driver",
  "memory/device-memory-fake",
  "transfer/faults",
  "transfer/late-writes",
  "transfer/merging",
  "transfer/stray-errors",
  "backends/backend-errors",
];
const real = short
  ? ["process/invalid-calls"]
  : [
      "transfer/conformance.",
      "transfer/conformance-libfabric",
      "transfer/two-processes",
      "process/invalid-calls",
      "memory/host-memory",
      "process/garbage-collection",
      "memory/files",
    ];
if (!nixl.ready) console.error(`without real NIXL: ${nixl.why}`);
const names = nixl.ready ? [...standIn, ...real] : standIn;
const files = names.map((name) => `packages/nixl/test/${name}`);
spawn(
  join(root, "node_modules/.bin/vitest"),
  ["run", "--testTimeout=180000", "--hookTimeout=180000", ...files],
  {
    cwd: root,
    env,
    stdio: "inherit",
  },
).on("close", (code) => {
  process.exitCode = code ?? 1;
});
