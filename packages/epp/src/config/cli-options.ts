import { defined, fleetSettingsOf, merged, requireInstances } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import { createCommand, type Flags } from "./cli-command.js";
import { type PickerFileInput, type PickerSettingsInput, readConfigFile } from "./settings.js";

/** The command line, parsed. */
export interface CliOptions {
  readonly host: string;
  readonly port: number;
  readonly logLevel: Flags["logLevel"];
  /** File that spans are appended to. */
  readonly trace: string | undefined;
  /** The settings of the file, with those of the flags over them. `createPicker` checks them. */
  readonly settings: PickerSettingsInput;
}

const NO_FILE: PickerFileInput = {};

/**
 * Parses the arguments after the program's name, and the file of `--config`; flags override the file. Errors: `KV_CONFIG_INVALID`,
 * `KV_CONFIG_UNKNOWN_KEY`; commander exits with a message for an unknown flag.
 */
export function parseCli(args: readonly string[], readFile: (path: string) => string): CliOptions {
  const flags = createCommand()
    .parse([...args], { from: "user" })
    .opts<Flags>();
  const { host, port, ...file } =
    flags.config === undefined ? NO_FILE : readConfigFile(flags.config, readFile);
  const settings = merged(file, settingsOf(flags)) as PickerSettingsInput;
  requireInstances(settings);
  return {
    host: flags.host ?? host ?? "127.0.0.1",
    port: flags.port ?? port ?? 9002,
    logLevel: flags.logLevel,
    trace: flags.trace,
    settings,
  };
}

function settingsOf(flags: Flags): PickerSettingsInput {
  const metrics = defined({ host: flags.metricsHost, port: flags.metricsPort });
  return defined({
    ...fleetSettingsOf(flags),
    tls: tlsOf(flags),
    healthPort: flags.healthPort,
    metricsServer: Object.keys(metrics).length > 0 ? metrics : undefined,
    fallbacks: flags.fallbacks,
    unsplittable: flags.unsplittable,
    exposeInstances: flags.exposeInstances,
    forwardHeaders: flags.forwardHeader,
    limits: defined({
      requestsPerDecode: flags.shedAbove,
      bodyLengthBytes: flags.bodyLimitBytes,
      bodiesLengthBytes: flags.bodiesLimitBytes,
    }),
    timeouts: defined({ drainMs: flags.drainMs, graceMs: flags.graceMs }),
  }) as PickerSettingsInput;
}

function tlsOf({ tls, tlsCert: certFile, tlsKey: keyFile }: Flags): PickerSettingsInput["tls"] {
  if (certFile === undefined && keyFile === undefined) return tls ? undefined : false;
  if (tls && certFile !== undefined && keyFile !== undefined) return { certFile, keyFile };
  const given = [
    ...(tls ? [] : ["--no-tls"]),
    ...(certFile === undefined ? [] : ["--tls-cert"]),
    ...(keyFile === undefined ? [] : ["--tls-key"]),
  ];
  throw new KvError("KV_CONFIG_INVALID", `${given.join(" and ")} do not go together alone`, {
    hint: "give --tls-cert and --tls-key, or --no-tls, or none of them",
  });
}
