import { KvError, type SideChannel } from "@kv/interface";
import {
  type AgentMetadata,
  type CompatibilityExplanation,
  checkHandshakeSeal,
  decodeAgentMetadata,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  encodeHandshakeRequest,
  explainCompatibility,
  type HandshakeExtension,
  type HandshakePayload,
} from "@kv/protocol";
import { type ClockOffset, type ClockSample, clockOffset } from "./clock-offset.js";
import type { PeerAddress } from "../peers/peer-table.js";

/** What the ranks of a remote engine told, decoded and checked against what was expected of them. */
export interface Handshake {
  /** In the order in which the ranks were asked for. */
  readonly ranks: readonly HandshakeRank[];
  readonly clock: ClockOffset;
  /** Of our own peers: what vLLM's protocol has no place for. */
  readonly extension: HandshakeExtension | undefined;
}

export interface HandshakeRank {
  readonly ppRank: number;
  readonly tpRank: number;
  readonly metadata: AgentMetadata;
}

export interface HandshakeClientOptions {
  readonly sideChannel: SideChannel;
  /** vLLM 0.33: 5000. */
  readonly timeoutMs: number;
  readonly compatibility: {
    readonly hash: string;
    readonly factors: Readonly<Record<string, unknown>>;
    /** `enforce_handshake_compat`. */
    readonly enforced: boolean;
    /** Told once of a handshake that goes on although the digests differ: what was given up. */
    readonly relaxed?: (why: CompatibilityExplanation) => void;
  };
  /** Peers must sign what they tell with this key: plain vLLM, which cannot, is refused. */
  readonly key?: Uint8Array;
  /** The guide's ports, one per rank: rank r answers at the engine's port + r. */
  readonly portPerRank?: boolean;
}

/**
 * Asks each rank for its metadata (vLLM: `_nixl_handshake`). Errors: the side channel's; `KV_HANDSHAKE_REFUSED` when the peer says no; `KV_HANDSHAKE_UNTRUSTED`
 * when what it tells was changed on its way or is not signed with the key;
 * `KV_HANDSHAKE_INCOMPATIBLE` naming the factor that differs, before the metadata is decoded; `KV_HANDSHAKE_WRONG_ENGINE` when another
 * engine answers; `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export async function shakeHands(
  address: PeerAddress,
  tpRanks: readonly number[],
  options: HandshakeClientOptions,
): Promise<Handshake> {
  const samples: ClockSample[] = [];
  const ranks: HandshakeRank[] = [];
  let extension: HandshakeExtension | undefined;
  let relaxed = false;
  for (let ppRank = 0; ppRank < address.ppSize; ppRank++) {
    // One after the other, as vLLM asks: its listener answers one at a time, and the clock samples stay undisturbed.
    for (const tpRank of tpRanks) {
      const { payload, sample } = await ask(address, ppRank, tpRank, options);
      if (sample !== undefined) samples.push(sample);
      checkHandshakeSeal(payload, { ppRank, tpRank }, options.key);
      relaxed = checkCompatibility(address, payload, options, relaxed) || relaxed;
      const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
      checkEngine(address, metadata);
      extension = payload.extension;
      ranks.push({ ppRank, tpRank, metadata });
    }
  }
  if (samples.length === 0) {
    throw new KvError(
      "KV_HANDSHAKE_INCOMPATIBLE",
      `${nameOf(address)} did not tell its clock: its connector is older than version 5, this one speaks version 15`,
      { hint: "upgrade the peer to vLLM 0.32 or later" },
    );
  }
  return { ranks, clock: clockOffset(samples), extension };
}

async function ask(
  address: PeerAddress,
  ppRank: number,
  tpRank: number,
  { sideChannel, timeoutMs, portPerRank }: HandshakeClientOptions,
): Promise<{ payload: HandshakePayload; sample: ClockSample | undefined }> {
  const reply = await sideChannel.request({
    host: address.host,
    port: portPerRank === true ? address.port + tpRank : address.port,
    frames: [encodeHandshakeRequest({ ppRank, tpRank })],
    timeoutMs,
  });
  const refusal = decodeHandshakeRefusal(reply.frames);
  if (refusal !== undefined) {
    throw new KvError("KV_HANDSHAKE_REFUSED", `${nameOf(address)} refused the handshake: ${refusal}`, {
      hint: "check tp_size and pp_size in kv_transfer_params against the prefill worker's",
    });
  }
  const { payload, clockSeconds } = decodeHandshakeReply(reply.frames);
  return {
    payload,
    sample:
      clockSeconds === undefined
        ? undefined
        : { sentAtMs: reply.sentAtMs, receivedAtMs: reply.receivedAtMs, remoteSeconds: clockSeconds },
  };
}

/** Whether the digests differ and that was let pass; `told` when it has been said of this engine already. */
function checkCompatibility(
  address: PeerAddress,
  payload: HandshakePayload,
  { compatibility }: HandshakeClientOptions,
  told: boolean,
): boolean {
  if (payload.compatibilityHash === compatibility.hash) return false;
  if (!compatibility.enforced && (told || compatibility.relaxed === undefined)) return true;
  const factors = payload.extension?.factors;
  const sent =
    typeof factors === "object" && factors !== null ? { factors: factors as Record<string, unknown> } : {};
  const why = explainCompatibility(compatibility.factors, { hash: payload.compatibilityHash, ...sent });
  if (!compatibility.enforced) {
    compatibility.relaxed?.(why);
    return true;
  }
  throw new KvError("KV_HANDSHAKE_INCOMPATIBLE", `${nameOf(address)} cannot be read from: ${why.text}`, {
    hint: 'make the two configurations equal, or set "enforce_handshake_compat": false in kv_connector_extra_config to read all the same',
    details: { ours: compatibility.hash, theirs: payload.compatibilityHash, differences: why.differences },
  });
}

function checkEngine(address: PeerAddress, { engineId }: AgentMetadata): void {
  if (engineId === address.engineId) return;
  throw new KvError(
    "KV_HANDSHAKE_WRONG_ENGINE",
    `engine ${engineId} answers at ${address.host}:${address.port}, where engine ${address.engineId} was expected`,
    {
      hint: "the prefill worker was restarted, or two share an address: send the prompt to it again",
      details: { expected: address.engineId, found: engineId },
    },
  );
}

function nameOf({ engineId, host, port }: PeerAddress): string {
  return `engine ${engineId} at ${host}:${port}`;
}
