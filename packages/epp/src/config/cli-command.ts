import { addFleetOptions, type FleetFlags } from "@kv/fleet/front-end";
import { commanderOutput, packageVersion, port, wholeNumber } from "@kv/program";
import { Command, Option } from "commander";

/** The flags as commander parses them. */
export interface Flags extends FleetFlags {
  host?: string;
  port?: number;
  healthPort?: number;
  metricsHost?: string;
  metricsPort?: number;
  tlsCert?: string;
  tlsKey?: string;
  tls: boolean;
  fallbacks?: number;
  shedAbove?: number;
  unsplittable?: "fail" | "decode-computes";
  exposeInstances?: boolean;
  forwardHeader?: string[];
  bodyLimitBytes?: number;
  bodiesLimitBytes?: number;
  drainMs?: number;
  graceMs?: number;
}

/** The command with its flags and their help. */
export function createCommand(): Command {
  const command = new Command("kv-epp")
    .version(packageVersion(import.meta.url))
    .exitOverride()
    .configureOutput(commanderOutput("kv-epp"))
    .description(
      "Chooses a prefill and a decode instance for each request of Envoy: an Endpoint Picker of the Gateway API over ext_proc gRPC.",
    );
  return addFleetOptions(command)
    .option("--host <host>", "address to listen on (default: 127.0.0.1)")
    .option("--port <port>", "port of ext_proc and gRPC health; 0 takes a free one (default: 9002)", port)
    .option("--health-port <port>", "port of gRPC health without TLS, for probes of Kubernetes", port)
    .option("--metrics-host <host>", "address of /metrics, /status and /health (default: 127.0.0.1)")
    .option("--metrics-port <port>", "port of /metrics, /status and /health over HTTP", port)
    .option(
      "--tls-cert <file>",
      "PEM file of the certificate, read again when it changes (default: one is made)",
    )
    .option("--tls-key <file>", "PEM file of its key")
    .option("--no-tls", "without TLS")
    .option(
      "--fallbacks <n>",
      "instances named beside the chosen ones, for retries (default: 1)",
      wholeNumber,
    )
    .option(
      "--shed-above <n>",
      "answer with 429 when each decode instance has so many requests in flight (default: never)",
      wholeNumber,
    )
    .addOption(
      new Option(
        "--unsplittable <policy>",
        "when prefill and decode of a request cannot be split, as with beam search (default: fail)",
      ).choices(["fail", "decode-computes"]),
    )
    .option("--forward-header <name...>", "clients' headers that instances get with requests for token ids")
    .option("--expose-instances", "name instances and their addresses in errors to clients")
    .option("--body-limit-bytes <n>", "largest request body", wholeNumber)
    .option("--bodies-limit-bytes <n>", "all request bodies together", wholeNumber)
    .option(
      "--drain-ms <ms>",
      "after SIGTERM: health says NOT_SERVING before requests are refused",
      wholeNumber,
    )
    .option("--grace-ms <ms>", "time for requests in flight to end after that", wholeNumber)
    .allowExcessArguments(false);
}
