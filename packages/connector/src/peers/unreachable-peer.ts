import { KvError } from "@kv/interface";

/** Errors that say what is at an address. */
const ABOUT_THE_ADDRESS: readonly KvError["code"][] = [
  "KV_SIDE_CHANNEL_UNREACHABLE",
  "KV_SIDE_CHANNEL_TIMEOUT",
  "KV_WIRE_MALFORMED",
  "KV_WIRE_LIMIT_EXCEEDED",
];

/**
 * The error that a request's client gets when the address in its parameters does not answer as a prefill worker. It is the same whether
 * nothing listens there, another program does, or nothing answers: otherwise D would be a port scanner for its clients. The log has the
 * details. Other errors are returned unchanged.
 */
export function unreachablePeer(error: unknown): unknown {
  if (KvError.is(error, "KV_HANDSHAKE_BACKED_OFF")) {
    return new KvError(
      "KV_HANDSHAKE_BACKED_OFF",
      "the prefill worker that kv_transfer_params name has failed before and is not tried again yet",
      { hint: "the decode worker's log says why; send the prompt to another prefill worker" },
    );
  }
  if (!KvError.is(error) || !ABOUT_THE_ADDRESS.includes(error.code)) return error;
  return new KvError(
    "KV_SIDE_CHANNEL_UNREACHABLE",
    "the prefill worker that kv_transfer_params name does not answer",
    { hint: "the decode worker's log says why; send the prompt to a prefill worker again" },
  );
}
