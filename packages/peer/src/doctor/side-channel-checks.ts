import { KvError, type SideChannel } from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeMsgpack,
  NEWEST_VLLM_VERSION,
} from "@kv/protocol";
import { type Check, check, type Role } from "../checks/report.js";
import {
  decodeHandshake,
  exchangeHandshake,
  type RankHandshake,
  type SideChannelAddress,
} from "../protocol/handshake.js";
import type { ClockSample, SideChannelFacts } from "./server-facts.js";
import { isLoopback, isWildcard } from "./target.js";

export interface SideChannelReading {
  readonly role: Role;
  readonly sideChannel: SideChannel;
  readonly timeoutMs: number | undefined;
  /** Where peers shake hands; `default` is vLLM's default port. */
  readonly address: SideChannelAddress & { readonly source: "server" | "user" | "default" };
  /** The host of the server's URL; undefined when only the side channel was given. */
  readonly serverHost: string | undefined;
  readonly peerIsElsewhere: boolean;
  readonly expectedEngineId: string | undefined;
}

/**
 * Shakes hands twice with rank (0, 0). No other rank is asked: when vLLM 0.33 is asked for a rank
 * that it does not have, its listener stops for good.
 */
export async function readSideChannel(
  options: SideChannelReading,
): Promise<SideChannelFacts & { reading: Check[] }> {
  const { role, address, expectedEngineId } = options;
  const reading = address.source === "server" ? [checkAnnouncedHost(options)] : [];
  let answer: Answer;
  try {
    answer = await askTwice(options, address);
  } catch (thrown) {
    return { reading: [...reading, await unreachable(thrown, options)] };
  }
  const { payload, samples } = answer;
  const facts = { address, payload, clockSamples: samples, reading };
  const roundTripMs = samples.map(({ sentAtMs, receivedAtMs }) => receivedAtMs - sentAtMs);
  reading.push(
    check(
      `${role}.side-channel`,
      "side channel",
      "ok",
      `${address.host}:${address.port} answers for rank (0, 0) in ${Math.min(...roundTripMs).toFixed(1)} ms`,
    ),
  );
  try {
    const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
    reading.push(describeMetadata(role, metadata));
    if (expectedEngineId !== undefined)
      reading.push(checkEngineId(role, metadata.engineId, expectedEngineId));
    const onWire = decodeMsgpack(payload.agentMetadataBytes, "agent metadata") as object;
    return { ...facts, metadata, metadataFields: Object.keys(onWire) };
  } catch (thrown) {
    const { message } = KvError.from(thrown, "KV_WIRE_MALFORMED", "agent metadata");
    const fix = `the server's vLLM may be newer than ${NEWEST_VLLM_VERSION.version}: kv-peer wire on its wheel lists what it changed; or its connector is not a NixlConnector`;
    reading.push(check(`${role}.metadata`, "metadata", "fail", message, { fix }));
    return facts;
  }
}

interface Answer {
  readonly payload: RankHandshake["payload"];
  readonly samples: readonly ClockSample[];
}

/** Two handshakes give two samples of the clock offset. */
async function askTwice(
  { sideChannel, timeoutMs }: SideChannelReading,
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
  if (payload !== undefined && samples.length > 0) return { payload, samples };
  throw new KvError(
    "KV_HANDSHAKE_INCOMPATIBLE",
    "the reply has no clock frame: the server's connector is older than version 5",
    { hint: "upgrade the server to vLLM 0.32 or later" },
  );
}

async function unreachable(thrown: unknown, options: SideChannelReading): Promise<Check> {
  const { address, role } = options;
  const { code, message, hint } = KvError.from(
    thrown,
    "KV_SIDE_CHANNEL_UNREACHABLE",
    "side channel",
  );
  const found = [message];
  const elsewhere = await findAtServerHost(options);
  if (elsewhere !== undefined) found.push(`it answers at ${elsewhere}:${address.port}`);
  if (address.source === "default")
    found.push(`(the default port; --${role}-side-channel sets another)`);
  return check(`${role}.side-channel`, "side channel", "fail", found.join("\n"), {
    fix: elsewhere === undefined ? hint : fixHost(elsewhere),
    details: { code, ...address },
  });
}

/** A server that announces an unreachable address often listens under the host of its URL. */
async function findAtServerHost(options: SideChannelReading): Promise<string | undefined> {
  const { serverHost, address } = options;
  if (serverHost === undefined || serverHost === address.host) return undefined;
  return askTwice(options, { host: serverHost, port: address.port }).then(
    () => serverHost,
    () => undefined,
  );
}

function checkAnnouncedHost({
  role,
  address: { host },
  serverHost,
  peerIsElsewhere,
}: SideChannelReading): Check {
  const of = (status: Check["status"], found: string, fix?: string) =>
    check(`${role}.side-channel-host`, "side-channel host", status, found, { fix });
  const announces = `the server announces ${host}`;
  if (isWildcard(host))
    return of(
      "fail",
      `${announces}, an address to listen on; peers cannot connect to it`,
      fixHost(serverHost),
    );
  if (!isLoopback(host)) return of("ok", announces);
  const isRemote = serverHost !== undefined && !isLoopback(serverHost);
  if (isRemote || peerIsElsewhere)
    return of(
      "fail",
      `${announces}; a peer on another host would connect to itself`,
      fixHost(isRemote ? serverHost : undefined),
    );
  return of("ok", `${announces}, which works for a pair on one host`);
}

function checkEngineId(role: Role, found: string, expected: string): Check {
  if (found === expected) return check(`${role}.engine-id`, "engine id", "ok", found);
  return check(
    `${role}.engine-id`,
    "engine id",
    "fail",
    `over HTTP the server is engine ${expected}, but engine ${found} answers on its side channel`,
    {
      fix: "two servers share a side-channel port, or one was restarted: give each its own VLLM_NIXL_SIDE_CHANNEL_PORT",
    },
  );
}

function describeMetadata(role: Role, metadata: AgentMetadata): Check {
  const { regionMemoryTypes, blockSize, numBlocks, kvCacheLayout, attentionBackend } = metadata;
  const { physicalBlocksPerLogical } = metadata;
  const regions = metadata.baseAddresses.length;
  const memory = [...new Set(regionMemoryTypes ?? ["memory of unknown type"])].join(" and ");
  const kernels =
    physicalBlocksPerLogical > 1 ? `, ${physicalBlocksPerLogical} kernel blocks per block` : "";
  return check(
    `${role}.metadata`,
    "metadata",
    "ok",
    `${regions} regions of ${numBlocks} blocks in ${memory}, ${blockSize} tokens per kernel block${kernels}, ${kvCacheLayout}, ${attentionBackend}`,
    {
      details: {
        regions,
        numBlocks,
        blockSize,
        kvCacheLayout,
        attentionBackend,
        physicalBlocksPerLogical,
      },
    },
  );
}

function fixHost(host: string | undefined): string {
  return `set VLLM_NIXL_SIDE_CHANNEL_HOST=${host ?? "<an address that the peer can reach>"} on that server and restart it`;
}

export const roundTripMs = ({ sentAtMs, receivedAtMs }: ClockSample) => receivedAtMs - sentAtMs;
