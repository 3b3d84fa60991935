import { KV_CACHE_KINDS, type SideChannel, silentLog } from "@kv/interface";
import { listOf, oneOf, printError } from "@kv/program";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { Option } from "commander";

/** What `handshakeKeyOption` adds to a command's options. */
export interface SideChannelOptions {
  readonly handshakeKeyFile?: string;
}

/** `--handshake-key-file`. */
export function handshakeKeyOption(): Option {
  return new Option(
    "--handshake-key-file <file>",
    "file with the key of the side channels, where the engines have one (handshake_key_file)",
  );
}

/** `--groups`: the kinds of KV cache groups, which handshakes do not carry. */
export function groupsOption(): Option {
  return new Option(
    "--groups <kinds>",
    "kind of each KV cache group, such as full,mamba, where handshakes do not say it",
  ).argParser(listOf(oneOf(...KV_CACHE_KINDS)));
}

/** The side channel of a command. Its warnings go to stderr. Errors: `KV_CONFIG_INVALID` for a key file that cannot be used. */
export function openSideChannel({ handshakeKeyFile }: SideChannelOptions): SideChannel {
  return zmqSideChannel({
    log: {
      ...silentLog,
      warn: (event, fields) => printError(`kv-peer: ${event} ${JSON.stringify(fields)}\n`),
    },
    handshakeKeys: readHandshakeKeys("--handshake-key-file", handshakeKeyFile),
  });
}
