import { type SideChannel, silentLog } from "@kv/interface";
import { printError } from "@kv/program";
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

/**
 * The side channel of a command. Its warnings go to stderr. Errors: `KV_CONFIG_INVALID` for a key
 * file that cannot be used.
 */
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
