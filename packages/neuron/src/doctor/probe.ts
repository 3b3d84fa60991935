import { runTask, sendToOwner } from "@kv/program";
import { type DescribedLibrary, loadNrtAddon, nrtLibraryPaths, withNrtLibrary } from "../libnrt.js";

// Runs in a child process, which a bad library or runtime may crash or hang.

const TENSOR_BYTES = 4096;

/** What the probe of the runtime found. */
export interface TriedRuntime {
  readonly initMs: number;
  /** Written bytes were read back unchanged. */
  readonly copied: boolean;
}

const begin = (step: string) => void sendToOwner({ step });

function describeLibrary(): DescribedLibrary {
  begin("loading the library");
  return withNrtLibrary(nrtLibraryPaths(), (path) => loadNrtAddon().describe(path));
}

async function tryRuntime(): Promise<TriedRuntime> {
  const addon = loadNrtAddon();
  begin("nrt_init");
  const startedMs = performance.now();
  const runtime = withNrtLibrary(nrtLibraryPaths(), (path) => addon.open(path));
  const initMs = performance.now() - startedMs;
  begin("nrt_tensor_allocate");
  const tensor = new addon.Tensor(runtime, TENSOR_BYTES, 0, "kv-neuron-doctor");
  begin("copies to and from the device");
  const pattern = Uint8Array.from({ length: TENSOR_BYTES }, (_, at) => (at * 7 + 3) % 251);
  const all = Float64Array.of(0, TENSOR_BYTES);
  await tensor.copy(true, all, pattern.slice().buffer);
  const read = new ArrayBuffer(TENSOR_BYTES);
  await tensor.copy(false, all, read);
  const copied = new Uint8Array(read).every((byte, at) => byte === pattern[at]);
  begin("nrt_close");
  tensor.close();
  addon.close(runtime);
  return { initMs, copied };
}

await runTask(() => (process.argv[2] === "library" ? describeLibrary() : tryRuntime()));
