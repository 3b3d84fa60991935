import { execFile } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { promisify } from "node:util";
import { findLibrary } from "@kv/nixl";
import { PreloadFinder } from "../../packages/nixl/src/backends/plugins.js";
import { DEFAULT_VERSION } from "../../packages/nixl/src/install/wheels.js";
import { type LinePeer, linePeer } from "../clients/python.js";
import { pythonWith, userCache } from "../setup/user-cache.mjs";

const script = (name: string) => join(import.meta.dirname, name);
// As the addon has this process do.
if (existsSync("/dev/nvidia0")) process.env["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] ??= "on";
/** Once it is loaded, our addon sets variables for NIXL. */
const ofTheUser = { ...process.env };

/** Python with numpy and the NIXL wheel that `kv-nixl install` uses. */
const benchPython = async (): Promise<string> =>
  join(
    await pythonWith(`bench-venv-${DEFAULT_VERSION}`, [
      ["numpy"],
      ["--no-deps", `nixl-cu12==${DEFAULT_VERSION}`],
    ]),
    "python",
  );

/** undefined where `npm run test:vllm` has not set it up. */
function vllmPeer(name: string, env: NodeJS.ProcessEnv): LinePeer | undefined {
  const peer = process.env["KV_PEER_DIR"] ?? join(userCache, "kv-peer");
  if (!existsSync(join(peer, ".done"))) return undefined;
  const ofVllm = { VLLM_TARGET_DEVICE: "cpu", PYTHONPATH: join(peer, "vllm33") };
  return linePeer(join(peer, "vv", "bin", "python"), [script(name)], {
    ...ofTheUser,
    ...ofVllm,
    ...env,
  });
}

export const vllmPlans = () => vllmPeer("./python/vllm_peer.py", {});

export async function pythonNixl(backend = "UCX", numThreads = 0): Promise<LinePeer> {
  // What our own process loads for the backend, in the same order.
  const { libraries, variables } = await new PreloadFinder().find(
    backend,
    await findLibrary(),
    process.env,
  );
  const args = [script("./python/nixl_peer.py"), backend, String(numThreads), ...libraries];
  return linePeer(await benchPython(), args, { ...ofTheUser, ...Object.fromEntries(variables) });
}

/** The same with vLLM's own functions for ids; undefined where vLLM is not set up. */
export async function vllmNixl(): Promise<LinePeer | undefined> {
  const { stdout } = await promisify(execFile)(await benchPython(), [
    "-c",
    "import sysconfig; print(sysconfig.get_path('purelib'))",
  ]);
  // One thread, like our side: vLLM's imports would otherwise start more.
  const env = { ["KV_BENCH_NIXL"]: stdout.trim(), ["OMP_NUM_THREADS"]: "1" };
  return vllmPeer("./python/nixl_peer.py", env);
}

/** The process whose memory both sides of a benchmark read and write. */
export const nodeTarget = (backend = "UCX"): LinePeer =>
  linePeer(process.execPath, ["--import", "tsx", script("./nixl/target.ts"), backend]);
