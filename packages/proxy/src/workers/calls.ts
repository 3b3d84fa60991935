import { KvError, type KvErrorCode } from "@kv/interface";
import { type BirpcReturn, type ChannelOptions, createBirpc } from "birpc";

type PlainError = ReturnType<KvError["toJSON"]>;

/**
 * Calls between a worker and its primary, over messages of `node:cluster`. Arguments and results
 * are plain data, and errors are `KvError`s. Messages of one direction stay in order.
 */
export function callsOver<Remote extends object, Own extends object>(
  own: Own,
  channel: Pick<ChannelOptions, "post" | "on">,
): BirpcReturn<Remote, Own> {
  return createBirpc<Remote, Own>(own, {
    ...channel,
    bind: "functions",
    timeout: -1,
    serialize: (message: { readonly e?: unknown }) =>
      message.e === undefined ? message : { ...message, e: plainError(message.e) },
    deserialize: (message: { readonly e?: PlainError }) =>
      message.e === undefined ? message : { ...message, e: errorOf(message.e) },
  });
}

function plainError(thrown: unknown): PlainError {
  return KvError.from(thrown, "KV_INTERNAL", "a call failed in another process").toJSON();
}

function errorOf({ code, message, hint, details }: PlainError): KvError {
  return new KvError(code as KvErrorCode, message, {
    hint,
    details: details as Record<string, unknown>,
  });
}
