/** What an Envoy stands in front of. */
export interface EnvoyOptions {
  /** Port for clients on the loopback. Default: 0, a free one. */
  readonly port?: number | undefined;
  /** Port of the picker. */
  readonly pickerPort: number;
  /** `ip:port` of each decode instance. */
  readonly endpoints: readonly string[];
  /** Whether requests go on without the picker when it is away (`FailOpen`). */
  readonly failOpen: boolean;
  /**
   * `ip:port` of the instances that the picker may choose, as a gateway says so in a subset hint.
   */
  readonly subset?: readonly string[] | undefined;
}

const HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const DESTINATION = "x-gateway-destination-endpoint";

/**
 * Envoy ends its streams to the picker by half-closing them. By default it resets them; Node.js
 * takes 1,000 resets on a connection and 33 more a second, and then ends the connection with all
 * requests on it.
 */
const HALF_CLOSE = { "envoy.reloadable_features.ext_proc_graceful_grpc_close": true };

const typed = (name: string, rest: object = {}) => ({
  "@type": `type.googleapis.com/${name}`,
  ...rest,
});

const address = (host: string, port: number) => ({
  address: { socket_address: { address: host, port_value: port } },
});

/** An extension of Envoy: its name, its type and its configuration. */
const extension = (name: string, type: string, config: object = {}) => ({
  name,
  typed_config: typed(type, config),
});

const HTTP_FILTERS = "envoy.extensions.filters.http";
const POLICIES = "envoy.extensions.load_balancing_policies";
const HTTP_PROTOCOL = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/**
 * A cluster of fixed endpoints, `ip:port` each. `protocol`: its HTTP, as Envoy's options have it.
 */
function staticCluster(
  name: string,
  endpoints: readonly string[],
  protocol: object,
  more: object,
): Readonly<Record<string, unknown>> {
  return {
    name,
    type: "STATIC",
    connect_timeout: "2s",
    load_assignment: {
      cluster_name: name,
      endpoints: [{ lb_endpoints: endpoints.map(endpointOf) }],
    },
    typed_extension_protocol_options: { [HTTP_PROTOCOL]: typed(HTTP_PROTOCOL, protocol) },
    ...more,
  };
}

function endpointOf(endpoint: string) {
  const [, host = "", port = ""] = /^(.*):(\d+)$/.exec(endpoint) ?? [];
  return { endpoint: address(host, Number(port)) };
}

/** The load balancing by one policy of Envoy. */
const balancing = (name: string, type: string, config: object = {}) => ({
  policies: [
    {
      typed_extension_config: extension(
        `envoy.load_balancing_policies.${name}`,
        `${POLICIES}.${name}.v3.${type}`,
        config,
      ),
    },
  ],
});

/** The picker, asked over gRPC for each request and each answer. */
const extProc = (failOpen: boolean) =>
  extension("envoy.filters.http.ext_proc", `${HTTP_FILTERS}.ext_proc.v3.ExternalProcessor`, {
    grpc_service: { envoy_grpc: { cluster_name: "picker" }, timeout: "10s" },
    failure_mode_allow: failOpen,
    status_on_error: { code: 503 },
    processing_mode: {
      request_header_mode: "SEND",
      response_header_mode: "SEND",
      request_body_mode: "FULL_DUPLEX_STREAMED",
      response_body_mode: "FULL_DUPLEX_STREAMED",
      request_trailer_mode: "SEND",
      response_trailer_mode: "SEND",
    },
    response_attributes: ["upstream.address"],
    metadata_options: {
      forwarding_namespaces: { untyped: ["envoy.lb.subset_hint", "envoy.lb"] },
      receiving_namespaces: { untyped: ["envoy.lb"] },
    },
  });

/** Without the picker (`FailOpen`), a client could name the prefill instance. */
const withoutPrefiller = extension(
  "envoy.filters.http.header_mutation",
  `${HTTP_FILTERS}.header_mutation.v3.HeaderMutation`,
  { mutations: { request_mutations: [{ remove: "x-prefiller-host-port" }] } },
);

const subsetHint = (subset: readonly string[]) =>
  extension("envoy.filters.http.set_metadata", `${HTTP_FILTERS}.set_metadata.v3.Config`, {
    metadata: [
      {
        metadata_namespace: "envoy.lb.subset_hint",
        value: { "x-gateway-destination-endpoint-subset": subset },
      },
    ],
  });

/**
 * The configuration, as JSON for Envoy's `-c`: clients over HTTP/1.1, the picker over ext_proc with
 * TLS, and the decode instances as one cluster whose load balancing takes the picker's list
 * (`override_host`), with one retry at the next one.
 */
export function envoyConfig({ port = 0, pickerPort, endpoints, failOpen, subset }: EnvoyOptions) {
  const retry = { retry_on: "connect-failure,refused-stream", num_retries: 1 };
  const route = { cluster: "decode", timeout: "0s", retry_policy: retry };
  const routes = [{ match: { prefix: "/" }, route }];
  const clients = extension("envoy.filters.network.http_connection_manager", HCM, {
    stat_prefix: "clients",
    route_config: { virtual_hosts: [{ name: "all", domains: ["*"], routes }] },
    http_filters: [
      ...(subset === undefined ? [] : [subsetHint(subset)]),
      withoutPrefiller,
      extProc(failOpen),
      extension("envoy.filters.http.router", `${HTTP_FILTERS}.router.v3.Router`),
    ],
  });
  const picker = staticCluster(
    "picker",
    [`127.0.0.1:${pickerPort}`],
    { explicit_http_config: { http2_protocol_options: {} } },
    {
      // Envoy cannot go on without the picker once it has sent it a part of a body. So it must know
      // before that the picker is away.
      health_checks: [
        {
          timeout: "1s",
          interval: "0.2s",
          no_traffic_interval: "0.2s",
          unhealthy_threshold: 1,
          healthy_threshold: 1,
          always_log_health_check_failures: false,
          grpc_health_check: { service_name: "readiness" },
        },
      ],
      common_lb_config: { healthy_panic_threshold: { value: 0 } },
      // The picker's certificate is made at its start, so it is not verified. Envoy's health checks
      // send no ALPN of their own.
      transport_socket: extension(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        { common_tls_context: { alpn_protocols: ["h2"] } },
      ),
    },
  );
  const decode = staticCluster(
    "decode",
    endpoints,
    {
      explicit_http_config: { http_protocol_options: {} },
      // Shorter than `kv-proxy` keeps its connections (75 s): a request on one that is being closed
      // would fail.
      common_http_protocol_options: { idle_timeout: "60s" },
    },
    {
      load_balancing_policy: balancing("override_host", "OverrideHost", {
        override_host_sources: [
          { metadata: { key: "envoy.lb", path: [{ key: DESTINATION }] } },
          { header: DESTINATION },
        ],
        fallback_policy: balancing("round_robin", "RoundRobin"),
      }),
    },
  );
  const listener = {
    name: "clients",
    ...address("127.0.0.1", port),
    filter_chains: [{ filters: [clients] }],
  };
  return {
    admin: address("127.0.0.1", 0),
    layered_runtime: { layers: [{ name: "static", static_layer: HALF_CLOSE }] },
    static_resources: { listeners: [listener], clusters: [picker, decode] },
  };
}
