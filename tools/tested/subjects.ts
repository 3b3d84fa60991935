/** A place or a peer that the packages may meet, in the order of the table. */
export interface Subject {
  /** The name of its record: `docs/tested/ID.json`. */
  readonly id: string;
  /** Its row. */
  readonly title: string;
  /** What stands in for it in tests, where it has no record. */
  readonly without: string;
  /** A page that has its own records, in place of one here: a link in Markdown from `docs`. */
  readonly page?: readonly [text: string, file: string];
}

/** All rows of the table. A row without a record says "never". */
export const SUBJECTS: readonly Subject[] = [
  {
    id: "x64",
    title: "Linux x86_64, UCX over shared memory and TCP, LIBFABRIC over TCP",
    without: "",
  },
  { id: "node-20", title: "Node 20", without: "" },
  { id: "node-22", title: "Node 22", without: "" },
  { id: "node-24", title: "Node 24", without: "" },
  { id: "node-26", title: "Node 26", without: "" },
  { id: "bun", title: "Bun", without: "" },
  { id: "deno", title: "Deno", without: "" },
  {
    id: "vllm",
    title: "vLLM on the CPU, a tiny model in float32, TP 1 and 2, pull and push, both roles",
    without: "",
    page: ["live tests, by version", "vllm-versions.md"],
  },
  {
    id: "gpu",
    title: "Memory of one NVIDIA GPU, without vLLM",
    without: "the code paths run against a stand-in for the CUDA driver",
  },
  { id: "rdma", title: "RDMA (InfiniBand, RoCE)", without: "" },
  { id: "efa", title: "AWS EFA", without: "LIBFABRIC runs over TCP" },
  {
    id: "neuron",
    title: "AWS Trainium and Inferentia",
    without: "a simulated device and a stand-in for `libnrt`",
  },
  {
    id: "arm64",
    title: "Linux arm64 hardware",
    without: "built, and run under QEMU's user mode with a stand-in for NIXL",
  },
  {
    id: "musl",
    title: "Alpine and other systems with musl",
    without: "NIXL's wheels need glibc 2.28; the addon says so",
  },
];
