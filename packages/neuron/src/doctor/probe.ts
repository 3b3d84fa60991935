import { KvError } from "@kv/interface";
import { type DescribedLibrary, loadNrtAddon, nrtLibraryPaths, withNrtLibrary } from "../libnrt.js";
import type { ProbeMessage, TriedRuntime } from "./run-probe.js";

// This file is the entry point of a process of its own: a damaged library or a faulty runtime may crash or hang it.

const TENSOR_BYTES = 4096;

const send = (message: ProbeMessage) => void process.send?.(message);

function describeLibrary(): DescribedLibrary {
  send({ step: "loading the library" });
  return withNrtLibrary(nrtLibraryPaths(), (path) => loadNrtAddon().describe(path));
}

async function tryRuntime(): Promise<TriedRuntime> {
  const addon = loadNrtAddon();
  send({ step: "nrt_init" });
  const startedMs = performance.now();
  const runtime = withNrtLibrary(nrtLibraryPaths(), (path) => addon.open(path));
  const initMs = performance.now() - startedMs;
  send({ step: "nrt_tensor_allocate" });
  const tensor = new addon.Tensor(runtime, TENSOR_BYTES, 0, "kv-neuron-doctor");
  send({ step: "copies to and from the device" });
  const pattern = Uint8Array.from({ length: TENSOR_BYTES }, (_, at) => (at * 7 + 3) % 251);
  const all = Float64Array.of(0, TENSOR_BYTES);
  await tensor.copy(true, all, pattern.slice().buffer);
  const read = new ArrayBuffer(TENSOR_BYTES);
  await tensor.copy(false, all, read);
  const copied = new Uint8Array(read).every((byte, at) => byte === pattern[at]);
  send({ step: "nrt_close" });
  tensor.close();
  addon.close(runtime);
  return { initMs, copied };
}

try {
  send({ result: process.argv[2] === "library" ? describeLibrary() : await tryRuntime() });
} catch (error) {
  const { message, hint } = KvError.from(error, "KV_STAGING_FAILED", "the probe failed");
  send({ error: message, hint });
}
process.disconnect?.();
