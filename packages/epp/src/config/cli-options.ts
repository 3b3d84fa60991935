import {
  fleetFlags,
  group,
  invalidConfig,
  type LogLevel,
  merged,
  readCommandLine,
  setting,
  withFleetFlags,
} from "@kv/fleet/front-end";
import { z } from "zod";
import { listenSchema, type PickerSettingsInput, pickerFileSchema } from "./settings.js";

export interface CliOptions {
  readonly host: string;
  readonly port: number;
  readonly logLevel: LogLevel;
  readonly trace: string | undefined;
  /** `createPicker` checks them. */
  readonly settings: PickerSettingsInput;
}

const pickerFlags = fleetFlags.extend(
  group("TLS", {
    tlsCert: setting(
      z.string().optional(),
    )`--tls-cert <file>: PEM file of the certificate, read again when it
        changes (default: one is made)`,
    tlsKey: setting(z.string().optional())`--tls-key <file>: PEM file of its key`,
    tls: setting(z.boolean())`--no-tls: without TLS`,
  }),
);

export const PROGRAM = {
  name: "kv-epp",
  description:
    "Chooses a prefill and a decode instance for each request of Envoy: an Endpoint Picker of the Gateway API over ext_proc gRPC.",
  module: import.meta.url,
  readme: "@kv/epp",
  file: pickerFileSchema,
  flags: pickerFlags,
};

/**
 * Flags override the file of `--config`.
 * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`.
 */
export function parseCli(args: readonly string[], readFile: (path: string) => string): CliOptions {
  const { flags, given, inFile } = readCommandLine(PROGRAM, args, readFile);
  const fromFlags = merged(withFleetFlags(given, flags), { tls: tlsOf(flags) });
  const { host, port, ...settings } = merged(listenSchema.parse({}), merged(inFile, fromFlags));
  const { logLevel, trace } = flags;
  return { host, port, logLevel, trace, settings };
}

function tlsOf({
  tls,
  tlsCert: certFile,
  tlsKey: keyFile,
}: z.output<typeof pickerFlags>): PickerSettingsInput["tls"] {
  if (certFile === undefined && keyFile === undefined) return tls ? undefined : false;
  if (tls && certFile !== undefined && keyFile !== undefined) return { certFile, keyFile };
  const given = [
    ...(tls ? [] : ["--no-tls"]),
    ...(certFile === undefined ? [] : ["--tls-cert"]),
    ...(keyFile === undefined ? [] : ["--tls-key"]),
  ];
  throw invalidConfig(
    `${given.join(" and ")} do not go together alone`,
    "give --tls-cert and --tls-key, or --no-tls, or none of them",
  );
}
