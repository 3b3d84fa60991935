import type { SideChannel } from "@kv/interface";
import {
  decodeHandshakePayload,
  decodeHandshakeRequest,
  encodeHandshakePayload,
} from "@kv/protocol";

/** As vLLM: only handshakes, without our own fields. */
export function plainSideChannel(sideChannel: SideChannel): SideChannel {
  return {
    ...sideChannel,
    listen: (options) =>
      sideChannel.listen({
        ...options,
        async answer(frames) {
          decodeHandshakeRequest(frames);
          const reply = await options.answer(frames);
          const [payload, clock] = reply ?? [];
          if (payload === undefined || clock === undefined) return undefined;
          const { compatibilityHash, agentMetadataBytes, rest } = decodeHandshakePayload(payload);
          return [encodeHandshakePayload({ compatibilityHash, agentMetadataBytes, rest }), clock];
        },
      }),
  };
}
