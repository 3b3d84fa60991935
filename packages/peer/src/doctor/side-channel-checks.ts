import { KvError, type SideChannel } from "@kv/interface";
import { decodeAgentMetadata, decodeMsgpack, NEWEST_VLLM_VERSION } from "@kv/protocol";
import {
  decodeHandshake,
  exchangeHandshake,
  type RankHandshake,
  type SideChannelAddress,
} from "../protocol/handshake.js";
import { type Check, type Role, type ServerCheck, ServerChecks } from "./pair-report.js";
import type { ClockSample, SideChannelFacts } from "./server-facts.js";
import { isLoopback, isWildcard } from "./target.js";

export interface SideChannelCheckOptions {
  readonly role: Role;
  readonly sideChannel: SideChannel;
  readonly timeoutMs: number;
  /**
   * Where peers shake hands, and the source of the address: the server's answer, the user, or
   * vLLM's default port.
   */
  readonly address: SideChannelAddress & { readonly source: "server" | "user" | "default" };
  /** The host of the server's URL; undefined when only the side channel was given. */
  readonly serverHost: string | undefined;
  /** Whether the other server of the pair runs on another host. */
  readonly peerIsElsewhere: boolean;
  /** The engine id that the server answered over HTTP. */
  readonly expectedEngineId: string | undefined;
}

const NO_FACTS: SideChannelFacts = {
  address: undefined,
  payload: undefined,
  metadata: undefined,
  metadataFields: undefined,
  clockSamples: [],
};

/**
 * Shakes hands twice with rank (0, 0). No other rank is asked: when vLLM 0.33 is asked for a rank
 * that it does not have, its listener stops for good.
 */
export async function checkSideChannel(
  options: SideChannelCheckOptions,
): Promise<{ facts: SideChannelFacts; checks: Check[] }> {
  const { role, address, expectedEngineId } = options;
  const checks = new ServerChecks(role);
  if (address.source === "server") checks.add("side-channel-host", checkAnnouncedHost(options));

  let answer: Answer;
  try {
    answer = await askTwice(options, address);
  } catch (thrown) {
    checks.add("side-channel", await describeFailure(thrown, options));
    return { facts: NO_FACTS, checks: checks.all };
  }
  const { payload, samples } = answer;
  checks.add("side-channel", {
    title: "side channel",
    status: "ok",
    found: `${address.host}:${address.port} answers for rank (0, 0) in ${Math.min(...samples.map(roundTripMs)).toFixed(1)} ms`,
  });

  try {
    const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
    checks.add("metadata", describeMetadata(metadata));
    if (expectedEngineId !== undefined)
      checks.add("engine-id", checkEngineId(metadata.engineId, expectedEngineId));
    const metadataFields = Object.keys(
      decodeMsgpack(payload.agentMetadataBytes, "agent metadata") as object,
    );
    const facts = { address, payload, metadata, metadataFields, clockSamples: samples };
    return { facts, checks: checks.all };
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_WIRE_MALFORMED", "agent metadata");
    checks.add("metadata", {
      title: "metadata",
      status: "fail",
      found: error.message,
      fix: `the server's vLLM may be newer than ${NEWEST_VLLM_VERSION.version}: kv-peer wire on its wheel lists what it changed; or its connector is not a NixlConnector`,
    });
    return { facts: { ...NO_FACTS, address, payload, clockSamples: samples }, checks: checks.all };
  }
}

interface Answer {
  readonly payload: RankHandshake["payload"];
  readonly samples: readonly ClockSample[];
}

/** Two handshakes give two samples of the clock offset. */
async function askTwice(
  { sideChannel, timeoutMs }: SideChannelCheckOptions,
  address: SideChannelAddress,
): Promise<Answer> {
  const samples: ClockSample[] = [];
  let payload: RankHandshake["payload"] | undefined;
  for (let time = 0; time < 2; time++) {
    const exchange = await exchangeHandshake(sideChannel, address, { timeoutMs });
    const decoded = decodeHandshake(exchange);
    payload = decoded.payload;
    const { sentAtMs, receivedAtMs } = exchange.reply;
    if (decoded.clockSeconds !== undefined) samples.push({ sentAtMs, receivedAtMs });
  }
  if (payload === undefined || samples.length === 0) {
    throw new KvError(
      "KV_HANDSHAKE_INCOMPATIBLE",
      "the reply has no clock frame: the server's connector is older than version 5",
      { hint: "upgrade the server to vLLM 0.32 or later" },
    );
  }
  return { payload, samples };
}

async function describeFailure(
  thrown: unknown,
  options: SideChannelCheckOptions,
): Promise<ServerCheck> {
  const { address, role } = options;
  const error = KvError.from(thrown, "KV_SIDE_CHANNEL_UNREACHABLE", "side channel");
  const alternative = await findAtServerHost(options);
  const found = [
    error.message,
    ...(alternative === undefined ? [] : [`it answers at ${alternative.host}:${alternative.port}`]),
    ...(address.source === "default"
      ? [`(the default port; --${role}-side-channel sets another)`]
      : []),
  ];
  return {
    title: "side channel",
    status: "fail",
    found: found.join("\n"),
    fix: alternative === undefined ? error.hint : fixHost(alternative.host),
    details: { code: error.code, ...address },
  };
}

/** A server that announces an unreachable address often listens under the host of its URL. */
async function findAtServerHost(
  options: SideChannelCheckOptions,
): Promise<SideChannelAddress | undefined> {
  const { serverHost, address } = options;
  if (serverHost === undefined || serverHost === address.host) return undefined;
  const alternative = { host: serverHost, port: address.port };
  return askTwice(options, alternative).then(
    () => alternative,
    () => undefined,
  );
}

function checkAnnouncedHost({
  address,
  serverHost,
  peerIsElsewhere,
}: SideChannelCheckOptions): ServerCheck {
  const title = "side-channel host";
  const { host } = address;
  const isRemote = serverHost !== undefined && !isLoopback(serverHost);
  if (isWildcard(host)) {
    const found = `the server announces ${host}, an address to listen on; peers cannot connect to it`;
    return { title, status: "fail", found, fix: fixHost(serverHost) };
  }
  if (isLoopback(host) && (isRemote || peerIsElsewhere)) {
    return {
      title,
      status: "fail",
      found: `the server announces ${host}; a peer on another host would connect to itself`,
      fix: fixHost(isRemote ? serverHost : undefined),
    };
  }
  const works = isLoopback(host) ? ", which works for a pair on one host" : "";
  return { title, status: "ok", found: `the server announces ${host}${works}` };
}

function checkEngineId(found: string, expected: string): ServerCheck {
  if (found === expected) return { title: "engine id", status: "ok", found };
  return {
    title: "engine id",
    status: "fail",
    found: `over HTTP the server is engine ${expected}, but engine ${found} answers on its side channel`,
    fix: "two servers share a side-channel port, or one was restarted: give each its own VLLM_NIXL_SIDE_CHANNEL_PORT",
  };
}

function describeMetadata(metadata: NonNullable<SideChannelFacts["metadata"]>): ServerCheck {
  const { regionMemoryTypes, blockSize, numBlocks, kvCacheLayout, attentionBackend } = metadata;
  const regions = metadata.baseAddresses.length;
  const memory = [...new Set(regionMemoryTypes ?? ["memory of unknown type"])].join(" and ");
  const kernels = metadata.physicalBlocksPerLogical;
  return {
    title: "metadata",
    status: "ok",
    found:
      `${regions} regions of ${numBlocks} blocks in ${memory}, ${blockSize} tokens per kernel block` +
      `${kernels > 1 ? `, ${kernels} kernel blocks per block` : ""}, ${kvCacheLayout}, ${attentionBackend}`,
    details: {
      regions,
      numBlocks,
      blockSize,
      kvCacheLayout,
      attentionBackend,
      physicalBlocksPerLogical: kernels,
    },
  };
}

function fixHost(host: string | undefined): string {
  return `set VLLM_NIXL_SIDE_CHANNEL_HOST=${host ?? "<an address that the peer can reach>"} on that server and restart it`;
}

export const roundTripMs = ({ sentAtMs, receivedAtMs }: ClockSample) => receivedAtMs - sentAtMs;
