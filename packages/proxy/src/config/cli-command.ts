import { addFleetOptions, type FleetFlags } from "@kv/fleet/front-end";
import { commanderOutput, each, packageVersion, port, wholeNumber } from "@kv/program";
import { Command, Option } from "commander";
import { MODES, PUSH_LEGS } from "./settings.js";

/** The flags as commander parses them. */
export interface Flags extends FleetFlags {
  host?: string;
  port?: number;
  workers?: number;
  prefillerHosts?: string[];
  prefillerPorts?: number[];
  decoderHosts?: string[];
  decoderPorts?: number[];
  push?: boolean;
  sidecar?: boolean;
  modelServerPort?: number;
  dataParallelSize?: number;
  allowPrefill?: string[];
  enableTls?: ("prefiller" | "decoder")[];
  secureProxy?: "true" | "false";
  certPath?: string;
  mode?: (typeof MODES)[number];
  pushLegs?: (typeof PUSH_LEGS)[number];
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
  adminHost?: string;
  adminPort?: number;
  adminTokenFile?: string;
  corsOrigin?: string[];
  instanceRoutes?: boolean;
}

/** The command with its flags and their help. */
export function createCommand(): Command {
  const policies = ["fail", "decode-computes"];
  const toy = "as in vLLM's toy proxy";
  const command = new Command("kv-proxy")
    .version(packageVersion(import.meta.url))
    .exitOverride()
    .configureOutput(commanderOutput("kv-proxy"))
    .description(
      "Routes OpenAI-style HTTP requests through a prefill and a decode instance. The decode instance gets the KV cache from the prefill instance.",
    );
  return addFleetOptions(command)
    .option("--host <host>", "address to listen on (default: 127.0.0.1)")
    .option("--port <port>", "port to listen on; 0 takes a free one (default: 8000)", port)
    .option("--workers <n>", "processes that serve the port, one for each core (default: 1)", wholeNumber)
    .option("--prefiller-host, --prefiller-hosts <host...>", `${toy}; a single host serves all ports`)
    .option("--prefiller-port, --prefiller-ports <port...>", toy, each(port))
    .option("--decoder-host, --decoder-hosts <host...>", toy)
    .option("--decoder-port, --decoder-ports <port...>", toy, each(port))
    .option(
      "--sidecar",
      "stand on the port of one decode instance; requests name their prefill instances in x-prefiller-host-port, as with llm-d",
    )
    .option(
      "--vllm-port, --model-server-port <port>",
      "sidecar: port of the decode instance on this machine (default: 8200)",
      port,
    )
    .option(
      "--data-parallel-size <n>",
      "sidecar: listen on so many ports from --port on, each for a rank of the decode server, at the ports from --vllm-port on (default: 1)",
      wholeNumber,
    )
    .option(
      "--allow-prefill <entry...>",
      "sidecar: prefill instances that requests may name: addresses, blocks such as 10.0.0.0/8, names, *.SUFFIX; each may have :PORT",
    )
    .addOption(
      new Option("--enable-tls <stage...>", "sidecar: reach instances of this role by HTTPS").choices([
        "prefiller",
        "decoder",
      ]),
    )
    .addOption(
      new Option("--secure-proxy [boolean]", "sidecar: speak TLS on its own port (default: false)")
        .choices(["true", "false"])
        .preset("true"),
    )
    .option(
      "--cert-path <folder>",
      "sidecar: folder of tls.crt and tls.key, read again when they change (default with --secure-proxy: one is made)",
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
      "--prefill-engine-id <id...>",
      "push: engine ids of the prefill instances (default: learned from their answers)",
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
    .option("--grace-ms <ms>", "time for requests in flight to end at SIGTERM", wholeNumber)
    .allowExcessArguments(false);
}
