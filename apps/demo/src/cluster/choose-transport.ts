import { KvError } from "@kv/interface";
import { findLibrary, type NixlTransport, nixlTransport } from "@kv/nixl";

export type TransportName = "nixl" | "memory";

/**
 * Chooses NIXL when it is installed, otherwise the embedded memory transport, with a line that
 * names the command to install NIXL.
 * @throws The errors of NIXL when `requested` is "nixl"; `KV_BACKEND_UNAVAILABLE` for a variable
 * that names no backend, in any case.
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

/**
 * Checks that the addon loads and the library exists; the instances open it.
 * @throws The errors of `@kv/nixl`.
 */
async function probeNixl(transport: NixlTransport): Promise<void> {
  try {
    transport.allocate(4096).close();
    await findLibrary();
  } finally {
    await transport.close();
  }
}
