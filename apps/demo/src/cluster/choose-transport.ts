import { KvError } from "@kv/interface";
import { findLibrary, type NixlTransport, nixlTransport } from "@kv/nixl";

export type TransportName = "nixl" | "memory";

/**
 * NIXL when it is installed, otherwise the embedded memory transport.
 * @throws The errors of NIXL when `requested` is "nixl"; `KV_BACKEND_UNAVAILABLE` for a variable
 * that names no backend.
 */
export async function chooseTransport(
  requested: TransportName | undefined,
  say: (line: string) => void,
): Promise<TransportName> {
  if (requested === "memory") return "memory";
  // Throws for a wrong setting, which is no missing NIXL.
  const probed = nixlTransport();
  try {
    await probeNixl(probed);
    return "nixl";
  } catch (error) {
    const failure = KvError.from(error, "KV_TRANSPORT_UNAVAILABLE", "NIXL cannot be used");
    if (requested === "nixl") throw failure;
    const [reason = ""] = failure.message.split("\n");
    say(
      `NIXL is not available (${reason}); ${failure.hint ?? "see: npx --no-install kv-nixl doctor"}. Continuing with the embedded transport.`,
    );
    return "memory";
  }
}

async function probeNixl(transport: NixlTransport): Promise<void> {
  try {
    transport.allocate(4096).close();
    await findLibrary();
  } finally {
    await transport.close();
  }
}
