import {
  KV_CACHE_KINDS,
  type KvCacheKind,
  KvError,
  type SideChannel,
  silentLog,
} from "@kv/interface";
import { groupsOfConfig } from "@kv/kv-plan";
import { addCommand, oneOf, onInterrupt, printError, type ValueReader } from "@kv/program";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import type { Command } from "commander";
import { serverUrl } from "../doctor/target.js";
import { EngineServer } from "../http/engine-server.js";
import type { GivenGroups } from "../protocol/cache-groups.js";
import table from "./options.json" with { type: "json" };

const cacheKind = oneOf(...KV_CACHE_KINDS);

/** `readers`: of kinds of values that only this command has. */
export function addPeerCommand(
  program: Command,
  name: keyof typeof table.commands,
  readers: Readonly<Record<string, ValueReader>> = {},
): Command {
  return addCommand(program, name, table, { engineServer, cacheKind, ...readers });
}

/** Time to free what the servers keep for a command. */
const RELEASE_MS = 5_000;

/** Aborted by the first Ctrl-C. */
export function interruptSignal(): AbortSignal {
  const stop = new AbortController();
  onInterrupt(() => stop.abort(), RELEASE_MS);
  return stop.signal;
}

/** @throws `KV_CONFIG_INVALID` for anything but the URL of an HTTP port. */
export const engineServer = (url: string) => new EngineServer(serverUrl(url));

export interface GroupsOptions {
  readonly groups?: readonly KvCacheKind[];
  readonly config?: string;
}

/** @throws `KV_CONFIG_INVALID` for both flags; those of `groupsOfConfig`. */
export async function givenGroups({
  groups,
  config,
}: GroupsOptions): Promise<GivenGroups | undefined> {
  if (config === undefined) return groups;
  if (groups === undefined) return await groupsOfConfig(config);
  throw new KvError(
    "KV_CONFIG_INVALID",
    `--config ${config} and --groups ${groups.join(",")} are both given`,
    { hint: "leave out --groups" },
  );
}

export interface SideChannelOptions {
  readonly handshakeKeyFile?: string;
}

/** @throws `KV_CONFIG_INVALID` for a key file that cannot be used. */
export function openSideChannel({
  handshakeKeyFile,
}: SideChannelOptions): SideChannel & AsyncDisposable {
  const sideChannel = zmqSideChannel({
    log: {
      ...silentLog,
      warn: (event, fields) => printError(`kv-peer: ${event} ${JSON.stringify(fields)}\n`),
    },
    handshakeKeys: readHandshakeKeys("--handshake-key-file", handshakeKeyFile),
  });
  return { ...sideChannel, [Symbol.asyncDispose]: sideChannel.close };
}

export interface ReachOptions extends SideChannelOptions {
  readonly sideChannelHost: string;
  readonly sideChannelPort: number;
}

/** Equal lengths give equal prompts, so recordings can be compared. */
export function fixedPrompt(length: number, index: number): readonly number[] {
  return Array.from({ length }, (_, at) => ((7 * at * at + 3 * at + 11 + 37 * index) % 900) + 10);
}
