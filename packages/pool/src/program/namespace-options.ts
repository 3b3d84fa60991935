import { KvError, type Log } from "@kv/interface";
import { addCommand, hostAndPort, type ValueReader } from "@kv/program";
import { type HandshakeKeys, readHandshakeKeys } from "@kv/side-channel";
import { askNamespace, type Namespace } from "@kv/tier";
import type { Command } from "commander";
import table from "./options.json" with { type: "json" };

/** Flags that both commands have. */
export interface NamespaceOptions {
  readonly host: string;
  readonly like?: string;
  readonly blockLength?: number;
  readonly fingerprint?: string;
  readonly hashSeed?: string;
  readonly handshakeKeyFile?: string;
}

const peer = (text: string): string => {
  hostAndPort(text);
  return text;
};

export function addPoolCommand(
  program: Command,
  name: keyof typeof table.commands,
  readers: Readonly<Record<string, ValueReader>> = {},
): Command {
  return addCommand(program, name, table, { peer, ...readers });
}

/** @throws `KV_CONFIG_INVALID` for a key file that cannot be used. */
export function keysOf({ handshakeKeyFile }: NamespaceOptions): HandshakeKeys | undefined {
  return readHandshakeKeys("--handshake-key-file", handshakeKeyFile);
}

/** @throws `KV_CONFIG_INVALID` when a value is missing, the errors of `askNamespace`. */
export async function namespaceOf(options: NamespaceOptions, log: Log): Promise<Namespace> {
  const { host, like, blockLength, fingerprint, hashSeed } = options;
  if (blockLength !== undefined && fingerprint !== undefined && hashSeed !== undefined)
    return { blockLengthBytes: blockLength, fingerprint, hashSeed };
  if (like === undefined)
    throw new KvError("KV_CONFIG_INVALID", "it is not known which blocks vLLM has", {
      hint: "give --like HOST:PORT of a server's P2P tier, or --block-length, --fingerprint and --hash-seed",
    });
  const asked = await askNamespace({ peerId: like, host, handshakeKeys: keysOf(options), log });
  return {
    blockLengthBytes: blockLength ?? asked.blockLengthBytes,
    fingerprint: fingerprint ?? asked.fingerprint,
    hashSeed: hashSeed ?? asked.hashSeed,
  };
}
