// Commands and modules that Go fetches through its module proxy and checks against its checksum
// database.
import { spawnSync } from "node:child_process";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { run } from "./setup.mjs";
import { cache, cachedFolder } from "./user-cache.mjs";

function go() {
  return ["go", "/usr/local/go/bin/go"].find(
    (command) => spawnSync(command, ["version"]).status === 0,
  );
}

/** Up to three times: a module proxy can fail for a moment. */
async function fetched(fetch) {
  for (const pause of [2_000, 10_000]) {
    try {
      return await fetch();
    } catch (error) {
      process.stderr.write(`once more in ${pause / 1000} s: ${error.message}\n`);
      await sleep(pause);
    }
  }
  return fetch();
}

export const hasGo = () => go() !== undefined;

/** In the user's cache, on PATH, or built into that cache. `probe`: arguments that end with 0. */
export function goTool({ name, version, source, probe }) {
  const cached = join(cache, `${name}-${version}`, "bin", name);
  /** Undefined where the machine has none. Fetches nothing. */
  const find = () => [cached, name].find((command) => spawnSync(command, probe).status === 0);
  const fetch = async () => {
    const found = find();
    if (found !== undefined) return found;
    const command = go();
    if (command === undefined)
      throw new Error(`${name} is missing, and so is Go, which builds it: install Go`);
    process.stderr.write(`build ${name} ${version} (once) …\n`);
    await cachedFolder(`${name}-${version}`, (work) => {
      const env = { ...process.env, GOBIN: join(work, "bin") };
      return fetched(() => run(command, ["install", `${source}@v${version}`], { env }));
    });
    return cached;
  };
  return { find, fetch };
}

/** The folder of a module's files, such as `sigs.k8s.io/gateway-api@v1.5.1`. */
export async function goModule(module) {
  const command = go();
  if (command === undefined) throw new Error(`Go is missing, which fetches ${module}: install Go`);
  return fetched(() => {
    const { stdout } = spawnSync(command, ["mod", "download", "-json", module], {
      cwd: tmpdir(),
      encoding: "utf8",
    });
    const { Dir: folder, Error: error } = JSON.parse(stdout || "{}");
    if (folder === undefined)
      throw new Error(`${module} could not be fetched: ${error ?? "go printed nothing"}`);
    return folder;
  });
}
