import { PAIRING_MODES, type PairingMode, ROUTING_NAMES, type RoutingName } from "@kv/fleet";
import { packageVersion } from "@kv/interface/program";
import { Command, InvalidArgumentError, Option } from "commander";
import { MODES, PUSH_LEGS } from "./settings.js";

const LOG_LEVELS = ["debug", "info", "warn", "error", "silent"] as const;
/** The least level that is logged. */
export type LogLevel = (typeof LOG_LEVELS)[number];

/** The flags as commander parses them. */
export interface Flags {
  config?: string;
  host?: string;
  port?: number;
  prefill?: string[];
  decode?: string[];
  prefillerHosts?: string[];
  prefillerPorts?: number[];
  decoderHosts?: string[];
  decoderPorts?: number[];
  push?: boolean;
  sidecar?: boolean;
  vllmPort?: number;
  allowPrefill?: string[];
  enableTls?: string[];
  mode?: (typeof MODES)[number];
  pushLegs?: (typeof PUSH_LEGS)[number];
  disaggregateAbove?: number;
  prefillEngineId?: string[];
  prefillKvHost?: string[];
  prefillSideChannelPort?: number[];
  prefillTpSize?: number[];
  decodeKvHost?: string[];
  decodeSideChannelPort?: number[];
  decodeTpSize?: number[];
  pairing?: PairingMode;
  missingKv?: "fail" | "decode-computes";
  unsplittable?: "fail" | "decode-computes";
  adminAllowedHost?: string[];
  bodyLimitBytes?: number;
  bodiesLimitBytes?: number;
  maxConnections?: number;
  maxConnectionsPerAddress?: number;
  maxRequests?: number;
  maxRequestsPerClient?: number;
  clientHeader?: string;
  forwardHeader?: string[];
  exposeInstances?: boolean;
  connectTimeoutMs?: number;
  prefillTimeoutMs?: number;
  firstByteTimeoutMs?: number;
  stallTimeoutMs?: number;
  requestTimeoutMs?: number;
  graceMs?: number;
  leaseMs?: number;
  healthIntervalMs?: number;
  routing?: RoutingName;
  prefillRouting?: RoutingName;
  decodeRouting?: RoutingName;
  discoveryFile?: string;
  kubernetesPods?: string;
  kubernetesNamespace?: string;
  dnsPrefill?: string;
  dnsDecode?: string;
  adminHost?: string;
  adminPort?: number;
  adminTokenFile?: string;
  corsOrigin?: string[];
  instanceRoutes?: boolean;
  trace?: string;
  logLevel: LogLevel;
}

/** The command with its flags and their help. */
export function createCommand(): Command {
  const policies = ["fail", "decode-computes"];
  const toy = "as in vLLM's toy proxy";
  return new Command("kv-proxy")
    .version(packageVersion(import.meta.url))
    .exitOverride()
    .description(
      "Routes OpenAI-style HTTP requests through a prefill and a decode instance. The decode instance gets the KV cache from the prefill instance.",
    )
    .option("--config <file>", "read settings from a JSON file (see schema/config.json); flags override it")
    .option("--prefill <url...>", "prefill instances: host:port or http(s)://host:port")
    .option("--decode <url...>", "decode instances")
    .option("--host <host>", "address to listen on (default: 127.0.0.1)")
    .option("--port <port>", "port to listen on; 0 takes a free one (default: 8000)", port)
    .option("--prefiller-host, --prefiller-hosts <host...>", `${toy}; a single host serves all ports`)
    .option("--prefiller-port, --prefiller-ports <port...>", toy, eachPort)
    .option("--decoder-host, --decoder-hosts <host...>", toy)
    .option("--decoder-port, --decoder-ports <port...>", toy, eachPort)
    .option(
      "--sidecar",
      "stand on the port of one decode instance; requests name their prefill instances in x-prefiller-host-port, as with llm-d",
    )
    .option(
      "--vllm-port <port>",
      "sidecar: port of the decode instance on this machine (default: 8001)",
      port,
    )
    .option(
      "--allow-prefill <entry...>",
      "sidecar: prefill instances that requests may name: addresses, blocks such as 10.0.0.0/8, names, *.SUFFIX; each may have :PORT",
    )
    .addOption(
      new Option("--enable-tls <stage...>", "sidecar: reach prefill instances by HTTPS").choices([
        "prefiller",
      ]),
    )
    .addOption(
      new Option(
        "--mode <mode>",
        "how the KV is transferred: pull (default, NixlConnector), push (NixlPushConnector), or auto (by each prefill instance's answers)",
      ).choices(MODES),
    )
    .option("--push", "the same as --mode push")
    .addOption(
      new Option(
        "--push-legs <order>",
        "push: send both legs at once (default), or decode after prefill",
      ).choices(PUSH_LEGS),
    )
    .option(
      "--disaggregate-above <tokens>",
      "a decode instance alone serves prompts with at most so many tokens that it does not have cached (default: two legs for all)",
      wholeNumber,
    )
    .option(
      "--prefill-engine-id <id...>",
      "push: engine ids of the prefill instances (default: learned from their answers)",
    )
    .option(
      "--prefill-kv-host <host...>",
      "side channel hosts of the prefill instances, for pairing and push; one for all, or one each",
    )
    .option(
      "--prefill-side-channel-port <port...>",
      "side channel ports of the prefill instances, for pairing and push (default: 5600)",
      eachPort,
    )
    .option("--prefill-tp-size <n...>", "TP sizes of the prefill instances (push: default 1)", eachNumber)
    .option("--decode-kv-host <host...>", "side channel hosts of the decode instances, for pairing")
    .option(
      "--decode-side-channel-port <port...>",
      "side channel ports of the decode instances, for pairing; one for all, or one each",
      eachPort,
    )
    .option("--decode-tp-size <n...>", "TP sizes of the decode instances, for pairing", eachNumber)
    .addOption(
      new Option(
        "--pairing <mode>",
        "what pairs with an instance whose side channel cannot be read: every instance (lenient, default), those of its label, none (strict); off reads no side channel",
      ).choices(PAIRING_MODES),
    )
    .addOption(
      new Option("--routing <strategy>", "how instances are chosen (default: round-robin)").choices(
        ROUTING_NAMES,
      ),
    )
    .addOption(
      new Option("--prefill-routing <strategy>", "for prefill instances only").choices(ROUTING_NAMES),
    )
    .addOption(new Option("--decode-routing <strategy>", "for decode instances only").choices(ROUTING_NAMES))
    .option("--discovery-file <file>", "follow a JSON file that lists the instances")
    .option("--dns-prefill <name>", "follow the DNS name of the prefill instances: host:port, or SRV records")
    .option("--dns-decode <name>", "follow the DNS name of the decode instances")
    .option(
      "--kubernetes-pods <selector>",
      "follow the pods with these labels, such as app=vllm; their roles are by the label llm-d.ai/role (needs @kubernetes/client-node)",
    )
    .option(
      "--kubernetes-namespace <name>",
      "namespace of the pods (default: that of the kubeconfig or the pod)",
    )
    .option("--admin-host <host>", "address of the admin routes (default: 127.0.0.1)")
    .option("--admin-port <port>", "port of the admin routes and the page (default: no admin routes)", port)
    .option(
      "--admin-token-file <file>",
      "file with the token of the admin routes (default: KV_PROXY_ADMIN_TOKEN)",
    )
    .addOption(
      new Option(
        "--missing-kv <policy>",
        "when a prefill instance answers without KV parameters (default: fail)",
      ).choices(policies),
    )
    .addOption(
      new Option(
        "--unsplittable <policy>",
        "when prefill and decode of a request cannot be split, as with beam search (default: fail)",
      ).choices(policies),
    )
    .option(
      "--admin-allowed-host <name...>",
      "names of this host that requests to the admin routes may have in their Host header",
    )
    .option("--cors-origin <origin...>", "origins whose web pages may use the routes for clients; * for all")
    .option(
      "--instance-routes",
      "serve /instances/add, /drain and /remove on the clients' port too, with the admin token where one is set",
    )
    .option("--forward-header <name...>", "clients' headers that instances get too, such as authorization")
    .option("--expose-instances", "name instances and their addresses in errors to clients and in /status")
    .option("--client-header <name>", "header by which a front end names the client, for limits per client")
    .option("--max-connections <n>", "clients' connections", wholeNumber)
    .option("--max-connections-per-address <n>", "connections from one address", wholeNumber)
    .option("--max-requests <n>", "requests in flight; each prompt and copy counts", wholeNumber)
    .option("--max-requests-per-client <n>", "requests in flight of one client", wholeNumber)
    .option("--body-limit-bytes <n>", "largest request body", wholeNumber)
    .option("--bodies-limit-bytes <n>", "all request bodies together; half of it for one client", wholeNumber)
    .option("--connect-timeout-ms <ms>", "time limit to connect to an instance", wholeNumber)
    .option("--prefill-timeout-ms <ms>", "time limit of the prefill leg", wholeNumber)
    .option("--first-byte-timeout-ms <ms>", "time limit for the decode leg's first byte", wholeNumber)
    .option("--stall-timeout-ms <ms>", "time limit between two chunks of an answer", wholeNumber)
    .option("--request-timeout-ms <ms>", "time limit of a whole request", wholeNumber)
    .option("--lease-ms <ms>", "how long a prefill instance surely holds blocks", wholeNumber)
    .option("--health-interval-ms <ms>", "time between two health checks; 0 disables them", wholeNumber)
    .option("--grace-ms <ms>", "time for requests in flight to end at SIGTERM", wholeNumber)
    .option(
      "--trace <file>",
      "append spans to a file as lines of OTLP JSON (OTEL_EXPORTER_OTLP_ENDPOINT sends them to a collector)",
    )
    .addOption(
      new Option("--log-level <level>", "least level of the JSON lines on stderr")
        .choices(LOG_LEVELS)
        .default("info"),
    )
    .allowExcessArguments(false);
}

function wholeNumber(text: string): number {
  if (!/^[0-9]{1,12}$/.test(text)) throw new InvalidArgumentError("It must be a whole number.");
  return Number(text);
}

function port(text: string): number {
  const value = wholeNumber(text);
  if (value > 65_535) throw new InvalidArgumentError("It must be a port, 65535 at most.");
  return value;
}

function eachNumber(text: string, before: number[] | undefined): number[] {
  return [...(before ?? []), wholeNumber(text)];
}

function eachPort(text: string, before: number[] | undefined): number[] {
  return [...(before ?? []), port(text)];
}
