import type { SideChannel } from "@kv/interface";
import {
  decodeHandshakePayload,
  decodeHandshakeReply,
  decodeHandshakeRequest,
  decodeLeaseQuery,
  decodeNotification,
  encodeHandshakePayload,
  encodeLeaseReply,
  encodeNotification,
  sealHandshake,
} from "@kv/protocol";

/**
 * What a scene takes out, so that it must find a violation. process: D believes that whatever
 * answers is the named process. blocks: D believes that P holds what D has read. capability,
 * secret: each message to P, or notice to D, has the right one. prompt: all prompts have equal
 * tokens.
 */
export type TakenOut = "process" | "blocks" | "capability" | "secret" | "prompt";

/** Lease replies say that the blocks are held. */
export function believing(
  sideChannel: SideChannel,
  incarnation: () => string,
  host?: string,
): SideChannel {
  return {
    ...sideChannel,
    withEncryption: (keys) =>
      believing(sideChannel.withEncryption?.(keys) ?? sideChannel, incarnation, host),
    async request(options) {
      if (host !== undefined && options.host !== host) return sideChannel.request(options);
      const query = decodeLeaseQuery(options.frames);
      if (query !== undefined) {
        const frames = [encodeLeaseReply({ incarnation: incarnation(), held: true })];
        return { frames, sentAtMs: 0, receivedAtMs: 0 };
      }
      const reply = await sideChannel.request(options);
      return { ...reply, frames: naming(options.frames, reply.frames, incarnation()) };
    },
  };
}

/** Its listener answers as the process `incarnation` does, as far as a stranger can. */
export function copying(sideChannel: SideChannel, incarnation: () => string): SideChannel {
  return {
    ...sideChannel,
    withEncryption: (keys) =>
      copying(sideChannel.withEncryption?.(keys) ?? sideChannel, incarnation),
    listen: (options) =>
      sideChannel.listen({
        ...options,
        async answer(frames) {
          if (decodeLeaseQuery(frames) !== undefined)
            return [encodeLeaseReply({ incarnation: incarnation(), held: true })];
          const reply = await options.answer(frames);
          return reply === undefined ? undefined : naming(frames, reply, incarnation());
        },
      }),
  };
}

function naming(
  request: readonly Uint8Array[],
  reply: readonly Uint8Array[],
  incarnation: string,
): readonly Uint8Array[] {
  const [first, clock] = reply;
  if (first === undefined || clock === undefined) return reply;
  decodeHandshakeReply(reply);
  const payload = decodeHandshakePayload(first);
  const extension = { ...payload.extension, incarnation };
  return [
    sealHandshake(
      encodeHandshakePayload({ ...payload, extension }),
      decodeHandshakeRequest(request),
    ),
    clock,
  ];
}

/** `proofOf` knows the right proof by the id of the request. */
export function withProof(
  payload: Uint8Array,
  field: "capability" | "secret",
  proofOf: (requestId: string) => string | undefined,
): Uint8Array {
  let notification: ReturnType<typeof decodeNotification>;
  try {
    notification = decodeNotification(payload);
  } catch {
    return payload;
  }
  if (notification.kind === "extension") {
    const message = proven(notification.message, field, proofOf) as typeof notification.message;
    return encodeNotification({ kind: "extension", message });
  }
  if (notification.kind !== "push-registration") return payload;
  const registration = proven(notification.registration, field, proofOf);
  return encodeNotification({ kind: "push-registration", registration });
}

type Plain = Readonly<Record<string, unknown>>;

function proven(
  message: Plain,
  field: "capability" | "secret",
  proofOf: (requestId: string) => string | undefined,
): Plain {
  const proof = proofOf(String(message.request_id));
  if (message[field] !== undefined)
    return proof === undefined ? message : { ...message, [field]: proof };
  // A registration has the capability in the part that names the request at P.
  const { kv_peer } = message as { kv_peer?: Plain & { prefill?: Plain } };
  if (kv_peer?.prefill === undefined) return message;
  return { ...message, kv_peer: { ...kv_peer, prefill: proven(kv_peer.prefill, field, proofOf) } };
}
