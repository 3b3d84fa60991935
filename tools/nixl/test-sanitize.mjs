// npm run test:sanitize [-- --short]: runs the addon's tests under ASan and UBSan, with the fake
// NIXL and with the real library. --short: of the latter only the traps, as npm test does with
// CI=true.
import { spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { root, runInTerminal, setup, turbo, vitest } from "../setup/setup.mjs";

const short = process.argv.includes("--short");
const compiler = process.env.CXX ?? "g++";

/** Preloaded: Node is not linked to it, and it must come before all other libraries. */
function library(name) {
  const path = spawnSync(compiler, [`-print-file-name=${name}`], {
    encoding: "utf8",
  }).stdout?.trim();
  if (path && path !== name && existsSync(path)) return path;
  console.error(`${compiler} has no ${name}: install its sanitizers, such as: apt-get install g++`);
  process.exit(1);
}

const { nixl } = await setup();
await turbo("compile:sanitized");
const folder = join(root, "native/build/sanitize");
const env = {
  ...process.env,
  LD_PRELOAD: ["libasan.so", "libubsan.so"].map(library).join(" "),
  // Node and NIXL do not free their memory at exit, so leaks are not reported.
  ASAN_OPTIONS: "detect_leaks=0:abort_on_error=1:new_delete_type_mismatch=0",
  UBSAN_OPTIONS: "print_stacktrace=1:halt_on_error=1",
  KV_NIXL_ADDON: join(folder, "kv_nixl.node"),
  KV_FAKE_NIXL: join(folder, "libfake_nixl_capi.so"),
};
const standIn = [
  "agent/agent-fake",
  "agent/prepared-transfer-faults",
  "transfer/brief-calls",
  "transfer/conformance-fake",
  "memory/cuda-driver",
  "memory/device-memory-fake",
  "transfer/faults",
  "transfer/late-writes",
  "transfer/merging",
  "transfer/notification-flood",
  "transfer/stray-errors",
  "backends/backend-errors",
  "process/children",
  "process/environment",
];
const real = short
  ? ["process/invalid-calls"]
  : [
      "agent/agent-real",
      "transfer/conformance.",
      "transfer/conformance-libfabric",
      "transfer/two-processes",
      "process/invalid-calls",
      "memory/host-memory",
      "memory/files",
    ];
if (!nixl.ready) console.error(`without real NIXL: ${nixl.why}`);
const names = nixl.ready ? [...standIn, ...real] : standIn;
const files = names.map((name) => `packages/nixl/test/${name}`);
process.exitCode = await runInTerminal(
  vitest,
  ["run", "--testTimeout=180000", "--hookTimeout=180000", ...files],
  env,
);
