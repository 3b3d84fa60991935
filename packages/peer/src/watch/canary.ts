import { KvError, type Random } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";
import type { Check } from "../checks/report.js";
import type { Reach } from "../headless/headless-engine.js";
import { filterNotifications } from "../headless/notification-filter.js";
import type { EngineServer } from "../http/engine-server.js";
import { readRankMetadata, type SideChannelAddress } from "../protocol/handshake.js";
import { readRemotePrefill } from "../protocol/remote-prefill.js";
import { compareKv, type DiffOptions, filledParts } from "../recording/diff.js";
import { receiveKv } from "../recording/receive-kv.js";
import { finding } from "./findings.js";

/** A pair of servers that serves requests, or a P alone. */
export interface WatchedPair {
  readonly prefill: EngineServer;
  readonly decode: EngineServer | undefined;
}

/** What the canary prompt must give: from a recording, or from the first P that answered. */
export interface CanaryReference {
  /** Where it is from, such as "the recording in DIR" or a P's URL. */
  readonly from: string;
  readonly kv: Uint8Array;
  /** Undefined until a D has generated. */
  tokens: readonly number[] | undefined;
}

export interface CanaryOptions extends DiffOptions, Reach {
  readonly random: Random;
  readonly prompt: readonly number[];
  readonly outputTokens: number;
}

export interface CanaryResult {
  readonly findings: readonly Check[];
  /** KV that was read at P, in bytes. */
  readonly kvBytes: number;
  /** Prompts that P computed, and tokens that D generated. */
  readonly prompts: number;
  readonly outputTokens: number;
  /** Of P's rank 0; undefined where the canary failed before. */
  readonly metadata: AgentMetadata | undefined;
  readonly sideChannel: SideChannelAddress | undefined;
  /** What this pair gave, for pairs and rounds that have no reference yet. */
  readonly reference: CanaryReference | undefined;
}

/**
 * Sends the canary prompt to a pair: P computes it, its KV is read at P and compared with the
 * reference, and D continues from the same blocks. Without a reference the pair's own results are
 * returned as one. A failure is a finding; nothing is thrown.
 */
export async function runCanary(
  { prefill, decode }: WatchedPair,
  reference: CanaryReference | undefined,
  options: CanaryOptions,
): Promise<CanaryResult> {
  const { prompt, outputTokens, random } = options;
  const findings: Check[] = [];
  const result = { kvBytes: 0, prompts: 0, outputTokens: 0 };
  let metadata: AgentMetadata | undefined;
  let sideChannel: SideChannelAddress | undefined;
  let kv: Uint8Array | undefined;
  let tokens: readonly number[] | undefined;
  let at = prefill;
  try {
    const params = await prefill.prefill(prompt);
    result.prompts += 1;
    const remote = readRemotePrefill(params);
    const isPush = remote.transferMode === "push";
    sideChannel = { host: remote.remoteHost, port: remote.remotePort };
    ({ metadata } = await readRankMetadata(options.sideChannel, sideChannel));
    const filter = filterNotifications(options.transport);
    // D reads the same blocks and notifies P; a second notification would free them too early.
    if (decode !== undefined && !isPush) filter.drop(remote.remoteRequestId);
    kv = await receiveKv(
      { tokens: prompt, params, remote },
      { ...options, transport: filter.transport },
    );
    result.kvBytes = kv.byteLength;
    if (reference !== undefined) {
      const ranks = Array.from({ length: remote.tpSize }, (_, tpRank) => ({
        tpRank,
        metadata: metadata as AgentMetadata,
      }));
      const parts = filledParts(
        ranks,
        { params: { ...params }, tokens: [...prompt] },
        options.groups,
      );
      const different = compareKv(reference.kv, kv, parts, options);
      const [first] = different;
      if (first !== undefined) {
        const found = `the KV of the canary differs from that of ${reference.from} in ${different.length} of ${parts.length} regions, first in ${first.region}: ${first.one} | ${first.other}`;
        findings.push(finding("kv-differs", prefill.url, found));
      }
    }
    if (decode !== undefined) {
      at = decode;
      // P pushes a prompt to one receiver only: for D it computes the prompt again.
      const requestId = isPush ? random.uuid() : undefined;
      const forDecode = isPush ? await prefill.prefill(prompt, { requestId }) : params;
      if (isPush) result.prompts += 1;
      tokens = await decode.decode(prompt, forDecode, outputTokens, { requestId });
      result.outputTokens = tokens.length;
      const wanted = reference?.tokens;
      const differs = wanted?.findIndex((token, index) => token !== tokens?.[index]) ?? -1;
      if (wanted !== undefined && differs >= 0) {
        const found = `token ${differs} of the canary is ${tokens[differs]} and not ${wanted[differs]} as at ${reference?.from}`;
        findings.push(finding("tokens-differ", decode.url, found));
      }
    }
  } catch (thrown) {
    const { code, message } = KvError.from(thrown, "KV_INTERNAL", "the canary failed");
    const isGone = code === "KV_PROXY_UPSTREAM_FAILED" && !/ answered \d+/.test(message);
    const kind = isGone || code.startsWith("KV_SIDE_CHANNEL") ? "unreachable" : "canary-failed";
    findings.push(finding(kind, at.url, `${message} [${code}]`));
  }
  return {
    ...result,
    findings,
    metadata,
    sideChannel,
    reference: kv === undefined ? undefined : { from: prefill.url, kv, tokens },
  };
}
