import { KvError } from "@kv/interface";
import { loadNrtAddon, nrtLibraryPaths, withNrtLibrary } from "../libnrt.js";
import type { DescribedLibrary, ProbeMessage, TriedRuntime } from "./probe-answers.js";

// A process of its own: loading a library that is damaged, or initialising a runtime that is not well, may end or stop it.

const TENSOR_BYTES = 4096;

const say = (message: ProbeMessage) => void process.send?.(message);

function describeLibrary(): DescribedLibrary {
  say({ stage: "loading the library" });
  return withNrtLibrary(nrtLibraryPaths(), (path) => loadNrtAddon().describe(path));
}

async function tryRuntime(): Promise<TriedRuntime> {
  const addon = loadNrtAddon();
  say({ stage: "nrt_init" });
  const startedMs = performance.now();
  const runtime = withNrtLibrary(nrtLibraryPaths(), (path) => addon.open(path));
  const initMs = performance.now() - startedMs;
  say({ stage: "nrt_tensor_allocate" });
  const tensor = new addon.Tensor(runtime, TENSOR_BYTES, 0, "kv-neuron-doctor");
  say({ stage: "copies to and from the device" });
  const pattern = Uint8Array.from({ length: TENSOR_BYTES }, (_, at) => (at * 7 + 3) % 251);
  const all = Float64Array.of(0, TENSOR_BYTES);
  await tensor.copy(true, all, pattern.slice().buffer);
  const read = new ArrayBuffer(TENSOR_BYTES);
  await tensor.copy(false, all, read);
  const copied = new Uint8Array(read).every((byte, at) => byte === pattern[at]);
  say({ stage: "nrt_close" });
  tensor.close();
  addon.close(runtime);
  return { initMs, copied };
}

try {
  say({ answer: process.argv[2] === "library" ? describeLibrary() : await tryRuntime() });
} catch (error) {
  const { message, hint } = KvError.from(error, "KV_STAGING_FAILED", "the probe failed");
  say({ error: message, ...(hint === undefined ? {} : { hint }) });
}
process.disconnect?.();
