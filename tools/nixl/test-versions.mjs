// npm run test:versions [-- 1.0.1 1.5.1]: runs the tests of @kv/nixl over UCX against several
// versions of NIXL, and then the programs of native/upstream against the default one. Each is
// fetched with pip (50 to 80 MB) into a cache below node_modules. The last lines are a table.
import { spawnSync } from "node:child_process";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { root, setupWithNixl, vitest } from "../setup/setup.mjs";

const VERSIONS = ["0.10.1", "1.0.1", "1.4.1", "1.5.0", "1.5.1"];
const FILES = [
  "transfer/conformance.test",
  "transfer/two-processes.test",
  "transfer/stopped-peer",
  "memory/host-memory.test",
  "process/invalid-calls",
  "process/lifecycle",
  "process/host-process",
];

const requested = process.argv.slice(2);
const versions = requested.length > 0 ? requested : VERSIONS;
await setupWithNixl("the tests need NIXL");
const { describePlugins, installNixl, summaryOf } = await import(
  pathToFileURL(join(root, "packages/nixl/dist/index.js")).href
);
const environment = { ...process.env, XDG_CACHE_HOME: join(root, "node_modules", ".cache") };
const rows = [];
for (const version of versions) {
  const onProgress = (line) => process.stderr.write(`${line}\n`);
  const { library } = await installNixl({ version, environment, onProgress });
  const plugins = await describePlugins({ libraryPath: library });
  const { status } = spawnSync(
    vitest,
    [
      "run",
      "--testTimeout=240000",
      "--hookTimeout=240000",
      // The table covers UCX only.
      "--testNamePattern=^(?!.*LIBFABRIC)",
      ...FILES.map((name) => `packages/nixl/test/${name}`),
    ],
    { cwd: root, stdio: "inherit", env: { ...process.env, KV_NIXL_LIBRARY: library } },
  );
  rows.push([
    version,
    status === 0 ? "pass" : "FAIL",
    plugins
      .filter(({ loads }) => loads)
      .map(({ name }) => name)
      .join(", "),
    plugins
      .filter(({ loads }) => !loads)
      .map(summaryOf)
      .join("; ") || "-",
  ]);
}
const upstream = ["--config", "tools/vllm/vitest.config.ts", "tools/nixl/upstream-faults.live.ts"];
const faults = spawnSync(vitest, ["run", ...upstream], { cwd: root, stdio: "inherit" });
const head = ["NIXL", "tests over UCX", "plugins that load", "plugins that do not"];
for (const row of [head, head.map(() => "---"), ...rows]) console.log(`| ${row.join(" | ")} |`);
const isPassed = rows.every(([, outcome]) => outcome === "pass");
process.exitCode = isPassed && faults.status === 0 ? 0 : 1;
