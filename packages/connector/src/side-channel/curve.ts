import { KvError } from "@kv/interface";
import { type CurveKeys, curveKeysOf } from "@kv/protocol";

/** The key pairs that are valid now: listeners accept each, requests use the first. Undefined: connections use NULL. */
export type CurveKeySource = (() => readonly CurveKeys[]) | undefined;

/** The key pairs of the shared keys, derived again when the keys have changed. */
export function curveKeysFrom(keys: () => readonly Uint8Array[]): CurveKeySource {
  let from: readonly Uint8Array[] | undefined;
  let derived: readonly CurveKeys[] = [];
  return () => {
    const current = keys();
    if (current !== from) {
      derived = current.map(curveKeysOf);
      from = current;
    }
    return derived;
  };
}

/** What to do when the mechanisms or the keys of two sides differ. */
export const CURVE_HINT =
  "set kv_connector_extra_config.side_channel_curve to true and handshake_key_file to the same key on both sides, or side_channel_curve on neither; vLLM has no CURVE";

/** Why a peer ends a connection when it has read this side's greeting: libzmq does it before its own greeting is complete. */
export const OTHER_MECHANISM =
  "it ended the connection when it saw this side's security mechanism CURVE, as a peer with NULL does";

/** Whether a session ended because of its mechanism or its keys. */
export function isAboutCurve(error: unknown): boolean {
  if (KvError.is(error, "KV_HANDSHAKE_UNTRUSTED")) return true;
  return KvError.is(error) && error.details?.["peerMechanism"] === "CURVE";
}
