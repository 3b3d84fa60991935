import { KvError, type SideChannel } from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeMsgpack,
  type HandshakePayload,
  NEWEST_VLLM_VERSION,
} from "@kv/protocol";
import { type Check, check, type Role } from "../checks/report.js";
import {
  decodeHandshake,
  exchangeHandshake,
  type SideChannelAddress,
} from "../protocol/remote-engine.js";
import type { ClockSample, SideChannelFacts } from "./server-facts.js";
import { isLoopback, isWildcard } from "./target.js";

export interface SideChannelReading {
  readonly role: Role;
  readonly sideChannel: SideChannel;
  readonly timeoutMs: number | undefined;
  readonly address: SideChannelAddress & { readonly source: "server" | "user" | "default" };
  /** Undefined when only the side channel was given. */
  readonly serverHost: string | undefined;
  readonly peerIsElsewhere: boolean;
  readonly expectedEngineId: string | undefined;
}

/** Asks only rank (0, 0): a missing rank stops vLLM 0.33's listener for good. */
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
  const { payload, clockSamples } = answer;
  const facts = { address, payload, clockSamples, reading };
  const bestMs = Math.min(...clockSamples.map(roundTripMs)).toFixed(1);
  const answers = `${address.host}:${address.port} answers for rank (0, 0) in ${bestMs} ms`;
  reading.push(check(`${role}.side-channel`, "side channel", "ok", answers));
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
    reading.push(check(`${role}.metadata`, "metadata", "fail", message, fix));
    return facts;
  }
}

interface Answer {
  readonly payload: HandshakePayload;
  readonly clockSamples: readonly ClockSample[];
}

async function askTwice(
  { sideChannel, timeoutMs }: SideChannelReading,
  address: SideChannelAddress,
): Promise<Answer> {
  const ask = async () => {
    const exchange = await exchangeHandshake(sideChannel, address, { timeoutMs });
    return { ...exchange.reply, ...decodeHandshake(exchange) };
  };
  const answers = [await ask(), await ask()] as const;
  const clockSamples = answers.filter(({ clockSeconds }) => clockSeconds !== undefined);
  if (clockSamples.length > 0) return { payload: answers[1].payload, clockSamples };
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
  const fix = elsewhere === undefined ? hint : fixHost(elsewhere);
  const details = { code, ...address };
  return check(`${role}.side-channel`, "side channel", "fail", found.join("\n"), fix, details);
}

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
  const of = (status: Check["status"], more: string, fix?: string) => {
    const found = `the server announces ${host}${more}`;
    return check(`${role}.side-channel-host`, "side-channel host", status, found, fix);
  };
  if (isWildcard(host))
    return of("fail", ", an address to listen on; peers cannot connect to it", fixHost(serverHost));
  if (!isLoopback(host)) return of("ok", "");
  const remoteHost = serverHost === undefined || isLoopback(serverHost) ? undefined : serverHost;
  if (remoteHost !== undefined || peerIsElsewhere)
    return of("fail", "; a peer on another host would connect to itself", fixHost(remoteHost));
  return of("ok", ", which works for a pair on one host");
}

function checkEngineId(role: Role, found: string, expected: string): Check {
  const id = `${role}.engine-id` as const;
  if (found === expected) return check(id, "engine id", "ok", found);
  return check(
    id,
    "engine id",
    "fail",
    `over HTTP the server is engine ${expected}, but engine ${found} answers on its side channel`,
    "two servers share a side-channel port, or one was restarted: give each its own VLLM_NIXL_SIDE_CHANNEL_PORT",
  );
}

function describeMetadata(role: Role, metadata: AgentMetadata): Check {
  const { numBlocks, blockSize, kvCacheLayout, attentionBackend } = metadata;
  const { regionMemoryTypes, physicalBlocksPerLogical: kernels } = metadata;
  const regions = metadata.baseAddresses.length;
  const memory = [...new Set(regionMemoryTypes ?? ["memory of unknown type"])].join(" and ");
  const perBlock = kernels > 1 ? `, ${kernels} kernel blocks per block` : "";
  const found = `${regions} regions of ${numBlocks} blocks in ${memory}, ${blockSize} tokens per kernel block${perBlock}, ${kvCacheLayout}, ${attentionBackend}`;
  return check(`${role}.metadata`, "metadata", "ok", found, undefined, {
    regions,
    numBlocks,
    blockSize,
    kvCacheLayout,
    attentionBackend,
    physicalBlocksPerLogical: kernels,
  });
}

function fixHost(host: string | undefined): string {
  return `set VLLM_NIXL_SIDE_CHANNEL_HOST=${host ?? "<an address that the peer can reach>"} on that server and restart it`;
}

export const roundTripMs = ({ sentAtMs, receivedAtMs }: ClockSample) => receivedAtMs - sentAtMs;
