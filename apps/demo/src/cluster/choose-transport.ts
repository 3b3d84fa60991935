import { KvError } from "@kv/interface";
import { findLibrary, nixlTransport } from "@kv/nixl";

export type TransportName = "nixl" | "memory";

/**
 * NIXL where it is to be had; else, when nobody asked for it by name, the embedded transport, and a line that says so with the
 * command that would help. Errors: those of NIXL when it was asked for.
 */
export async function chooseTransport(
  asked: TransportName | undefined,
  say: (line: string) => void,
): Promise<TransportName> {
  if (asked === "memory") return "memory";
  try {
    await probeNixl();
    return "nixl";
  } catch (error) {
    const failure = KvError.from(error, "KV_TRANSPORT_UNAVAILABLE", "NIXL cannot be used");
    if (asked === "nixl") throw failure;
    const [what = ""] = failure.message.split("\n");
    say(
      `NIXL is not here (${what}); ${failure.hint ?? "see: npx --no-install kv-nixl doctor"}. Going on with the embedded transport.`,
    );
    return "memory";
  }
}

/** Addon and library are there; neither is opened any further, that is the instances' affair. */
async function probeNixl(): Promise<void> {
  const transport = nixlTransport();
  try {
    transport.allocate(4096).close();
    await findLibrary();
  } finally {
    await transport.close();
  }
}
