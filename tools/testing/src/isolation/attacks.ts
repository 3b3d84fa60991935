import type { KvTransferParams } from "@kv/interface";
import {
  encodeNotification,
  encodeRegistration,
  encodeRegistrationEnded,
  encodeRegistrationWritten,
  encodeRequestControl,
  encodeWithdrawal,
  newCapability,
} from "@kv/protocol";

/** Everything but the parameters, keys and secrets of others. */
export interface Known {
  /** The attacker can guess all but the capability. */
  readonly victim: KvTransferParams;
  readonly own: KvTransferParams;
  /** That no P of the own request has. @default 99 */
  readonly laterGeneration?: number;
  readonly rogue: { readonly host: string; readonly port: number };
  /** D, as a handshake shows it. */
  readonly decode: {
    readonly host: string;
    readonly port: number;
    readonly incarnation: string;
    readonly tpSize: number;
  };
  /** D's id of the victim's request. */
  readonly decodeRequestId: string;
}

export const FORGED_PARAMS = {
  "own lease, other blocks": ({ own, victim }: Known) => ({
    ...own,
    remote_block_ids: victim.remote_block_ids,
  }),
  "own capability, other request": ({ own, victim }: Known) => ({
    ...victim,
    kv_peer: own.kv_peer,
  }),
  "guessed capability": ({ victim }: Known) => ({
    ...victim,
    kv_peer: { ...(victim.kv_peer as object), capability: newCapability() },
  }),
  "no capability": ({ victim }: Known) => ({ ...victim, kv_peer: null }),
  "own lease, own listener": ({ own, rogue, laterGeneration = 99 }: Known) => ({
    ...own,
    remote_host: rogue.host,
    remote_port: rogue.port,
    remote_registration_generation: laterGeneration,
  }),
  "later registration": ({ own, laterGeneration = 99 }: Known) => ({
    ...own,
    remote_registration_generation: laterGeneration,
  }),
  "wrong size": ({ own }: Known) => ({ ...own, tp_size: 2 * Number(own.tp_size) }),
  "closed port": ({ own }: Known) => ({ ...own, remote_port: 9 }),
  "other engine": ({ own }: Known) => ({ ...own, remote_engine_id: "q" }),
} as const;

/** They poison D's prefix cache where no key is required: see `SECURITY.md`. */
export const POISONING_PARAMS = {
  "own listener without a process": ({ own, rogue }: Known) => ({
    ...own,
    remote_host: rogue.host,
    remote_port: rogue.port,
    kv_peer: null,
  }),
} as const;

/** A client gives D the parameters of its own prompt with another prompt. */
export const OTHER_PROMPTS = {
  "the victim's prompt": ({ prompt }: VictimsPrompt) => ({ prompt }),
  "the victim's longer prompt": ({ prompt, numTokens }: VictimsPrompt) => ({
    prompt,
    numTokens: numTokens + 16,
  }),
  "the victim's prompt, of which D has a block": ({ prompt }: VictimsPrompt) => ({
    prompt,
    cachedTokens: 16,
  }),
  "the tokens of the client's prompt with another adapter": (
    { prompt }: VictimsPrompt,
    own: number,
  ) => ({
    prompt,
    sameTokensAs: own,
  }),
} as const;

interface VictimsPrompt {
  readonly prompt: number;
  readonly numTokens: number;
}

export const FORGED_FOR_PREFILL = {
  done: ({ victim }: Known) =>
    encodeNotification({ kind: "done", requestId: String(victim.remote_request_id), readers: 1 }),
  heartbeat: ({ victim }: Known) =>
    encodeNotification({ kind: "heartbeat", requestIds: [String(victim.remote_request_id)] }),
  "done with a capability": ({ victim, own }: Known) =>
    encodeRequestControl({
      kind: "done",
      requestId: String(victim.remote_request_id),
      readers: 1,
      capability: capabilityOf(own),
    }),
  registration: (known: Known) => encodeRegistration(...registrationOf(known, [[0, 1, 2]]), true),
  "plain registration": (known: Known) =>
    encodeRegistration(...registrationOf(known, [[0, 1, 2]]), false),
  "empty registration": (known: Known) => encodeWithdrawal(...registrationOf(known, [])),
} as const;

export const FORGED_FOR_DECODE = {
  done: ({ decodeRequestId }: Known) =>
    encodeNotification({ kind: "done", requestId: decodeRequestId, readers: 1 }),
  written: ({ decodeRequestId }: Known) =>
    encodeRegistrationWritten({ wireId: decodeRequestId, readers: 1, secret: newCapability() }),
  ended: ({ decodeRequestId, decode: { incarnation } }: Known) =>
    encodeRegistrationEnded({
      wireId: decodeRequestId,
      incarnation,
      generation: 1,
      secret: newCapability(),
      code: "KV_REQUEST_ABORTED",
      message: "forged",
    }),
} as const;

function capabilityOf({ kv_peer }: KvTransferParams): string {
  return (kv_peer as { capability: string }).capability;
}

function registrationOf(
  { victim, own, decode, decodeRequestId }: Known,
  localBlockIds: readonly (readonly number[])[],
): Parameters<typeof encodeWithdrawal> {
  const lease = { ...(victim.kv_peer as { incarnation: string; generation: number }) };
  const numTokens = Number(victim.remote_num_tokens);
  return [
    {
      requestId: decodeRequestId,
      wireId: decodeRequestId,
      secret: newCapability(),
      generation: 2 ** 40,
      oldestOpen: 2 ** 40,
      numTokens,
      localBlockIds,
      localComputedBlocks: [0],
      host: decode.host,
      port: decode.port,
      remote: {
        engineId: "p",
        host: "p",
        port: Number(victim.remote_port),
        tpSize: Number(victim.tp_size),
        ppSize: 1,
        requestId: String(victim.remote_request_id),
        lease: { ...lease, capability: capabilityOf(own) },
      },
    },
    { engineId: "d", tpSize: decode.tpSize, tpRank: 0, incarnation: decode.incarnation },
  ];
}
