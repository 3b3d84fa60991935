import type { WorkerHandshakeMetadata } from "@kv/interface";
import { decodeHandshakePayload, encodeHandshakePayload } from "@kv/protocol";

/**
 * A rank's handshake with another compatibility hash: of the server whose place is taken, for what that was made of is not known here. What our
 * own engines say beyond vLLM's protocol goes with `own`; without it the peer sees a plain vLLM.
 */
export function announceHash(
  metadata: WorkerHandshakeMetadata,
  compatibilityHash: string,
  { own }: { own: boolean },
): WorkerHandshakeMetadata {
  const { agentMetadataBytes, extension } = decodeHandshakePayload(metadata.payload);
  const extended = own && extension !== undefined ? { extension } : {};
  const payload = encodeHandshakePayload({ compatibilityHash, agentMetadataBytes, rest: {}, ...extended });
  return { ...metadata, payload };
}
