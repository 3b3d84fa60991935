import { KvError } from "@kv/interface";
import { type CurveKeys, curveKeysOf } from "../zmtp/curve.js";

/**
 * The key pairs that are valid now: listeners accept each, requests use the first. Undefined:
 * connections use NULL.
 */
export type CurveKeySource = (() => readonly CurveKeys[]) | undefined;

/** The key pairs of the shared keys, derived again when the keys have changed. */
export function curveKeysFrom(keys: () => readonly Uint8Array[]): () => readonly CurveKeys[] {
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

/** What to do when one side has a key and the other has none, or another one. */
export const CURVE_HINT =
  "give both sides the same key, or neither: handshake_key_file in kv_connector_extra_config of an engine, --handshake-key-file of kv-peer, kv-proxy and kv-epp; vLLM has no key";

/**
 * Why a peer ends a connection when it has read this side's greeting: libzmq does it before its own
 * greeting is complete.
 */
export const OTHER_MECHANISM =
  "it ended the connection when it saw this side's security mechanism CURVE, as a peer with NULL does";

/** Whether a session ended because of its mechanism or its keys. */
export function isAboutCurve(error: unknown): boolean {
  return KvError.is(error, "KV_HANDSHAKE_UNTRUSTED");
}
