import {
  KV_CACHE_KINDS,
  type KvCacheKind,
  KvError,
  type SideChannel,
  silentLog,
} from "@kv/interface";
import { groupsOfConfig } from "@kv/kv-plan";
import { duration, listOf, oneOf, onInterrupt, port, printError } from "@kv/program";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { type Command, Option } from "commander";
import { serverUrl } from "../doctor/target.js";
import { EngineServer } from "../http/engine-server.js";
import type { GivenGroups } from "../protocol/cache-groups.js";

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

export function addGroupsOptions(command: Command): Command {
  return command
    .option(
      "--config <file>",
      "config.json of the model: the kinds of its KV cache groups follow from it",
    )
    .addOption(
      new Option(
        "--groups <kinds>",
        "kind of each KV cache group, such as full,mamba, where handshakes do not say it and there is no config.json",
      ).argParser(listOf(oneOf(...KV_CACHE_KINDS))),
    );
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

export function handshakeKeyOption(): Option {
  return new Option(
    "--handshake-key-file <file>",
    "file with the key of the side channels, where the engines have one (handshake_key_file)",
  );
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

export function addReachOptions(command: Command): Command {
  return command
    .option(
      "--side-channel-host <host>",
      "host at which a server that pushes reaches this one",
      "127.0.0.1",
    )
    .option("--side-channel-port <port>", "port of the side channel; 0 takes a free one", port, 0)
    .addOption(handshakeKeyOption());
}

export const valueTypeOption = () =>
  new Option("--type <type>", "type of the values in KV; bytes are compared when absent").choices([
    "float32",
    "float16",
    "bfloat16",
  ]);

/** Equal lengths give equal prompts, so recordings can be compared. */
export function fixedPrompt(length: number, index: number): readonly number[] {
  return Array.from({ length }, (_, at) => ((7 * at * at + 3 * at + 11 + 37 * index) % 900) + 10);
}

export function timeOption(flags: string, description: string, usual: string): Option {
  return new Option(flags, description).argParser(duration).default(duration(usual), usual);
}
