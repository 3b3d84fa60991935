/** A change to what a library of NIXL calls, because the library has a fault. */
export interface RepairDescription {
  /** The library and its faulty versions. */
  readonly of: string;
  readonly fault: string;
  /** What may happen without the repair. */
  readonly without: string;
}

/** By the names that the addon and `KV_NIXL_REPAIRS_OFF` use. */
export const REPAIRS: Readonly<Record<string, RepairDescription>> = {
  "ucx-listener": {
    of: "UCX up to 1.23",
    fault: "its listener ends for good at any error of accept() but EAGAIN",
    without: "after a moment without free file descriptors no new peer can connect",
  },
  "ucx-lost-answers": {
    of: "UCX 1.19 to 1.23",
    fault: "it aborts, or uses freed memory, for an answer to a peer that has died, over TCP",
    without:
      "a peer that dies while it reads over TCP may end this process with SIGABRT or SIGSEGV",
  },
  "libfabric-endless-calls": {
    of: "NIXL up to 1.5.1 over libfabric's tcp provider",
    fault: "it repeats a call for ever while libfabric cannot connect to the peer",
    without: "a call for a peer that has died does not return, and its agent serves nobody",
  },
};
