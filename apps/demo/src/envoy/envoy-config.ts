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
  /** `ip:port` of the instances that the picker may choose, as a gateway says so in a subset hint. */
  readonly subset?: readonly string[] | undefined;
}

const HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const DESTINATION = "x-gateway-destination-endpoint";

/**
 * Envoy ends its streams to the picker by half-closing them. By default it resets them; Node.js takes 1,000 resets on a connection and 33 more a second, and then ends the connection
 * with all requests on it.
 */
const HALF_CLOSE = { "envoy.reloadable_features.ext_proc_graceful_grpc_close": true };

const typed = (name: string, rest: object = {}) => ({
  "@type": `type.googleapis.com/${name}`,
  ...rest,
});

const address = (host: string, port: number) => ({
  address: { socket_address: { address: host, port_value: port } },
});

function endpointOf(endpoint: string) {
  const [, host = "", port = ""] = /^(.*):(\d+)$/.exec(endpoint) ?? [];
  return { endpoint: address(host, Number(port)) };
}

/**
 * The configuration, as JSON for Envoy's `-c`: clients over HTTP/1.1, the picker over ext_proc with TLS, and the decode instances as one cluster whose load balancing takes the
 * picker's list (`override_host`), with one retry at the next one.
 */
export function envoyConfig({ port = 0, pickerPort, endpoints, failOpen, subset }: EnvoyOptions) {
  const extProc = {
    name: "envoy.filters.http.ext_proc",
    typed_config: typed("envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor", {
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
    }),
  };
  // Without the picker (`FailOpen`), a client could name the prefill instance.
  const withoutPrefiller = {
    name: "envoy.filters.http.header_mutation",
    typed_config: typed("envoy.extensions.filters.http.header_mutation.v3.HeaderMutation", {
      mutations: { request_mutations: [{ remove: "x-prefiller-host-port" }] },
    }),
  };
  const subsetHint = {
    name: "envoy.filters.http.set_metadata",
    typed_config: typed("envoy.extensions.filters.http.set_metadata.v3.Config", {
      metadata: [
        {
          metadata_namespace: "envoy.lb.subset_hint",
          value: { "x-gateway-destination-endpoint-subset": subset },
        },
      ],
    }),
  };
  return {
    admin: address("127.0.0.1", 0),
    layered_runtime: { layers: [{ name: "static", static_layer: HALF_CLOSE }] },
    static_resources: {
      listeners: [
        {
          name: "clients",
          ...address("127.0.0.1", port),
          filter_chains: [
            {
              filters: [
                {
                  name: "envoy.filters.network.http_connection_manager",
                  typed_config: typed(HCM, {
                    stat_prefix: "clients",
                    route_config: {
                      virtual_hosts: [
                        {
                          name: "all",
                          domains: ["*"],
                          routes: [
                            {
                              match: { prefix: "/" },
                              route: {
                                cluster: "decode",
                                timeout: "0s",
                                retry_policy: { retry_on: "connect-failure,refused-stream", num_retries: 1 },
                              },
                            },
                          ],
                        },
                      ],
                    },
                    http_filters: [
                      ...(subset === undefined ? [] : [subsetHint]),
                      withoutPrefiller,
                      extProc,
                      {
                        name: "envoy.filters.http.router",
                        typed_config: typed("envoy.extensions.filters.http.router.v3.Router"),
                      },
                    ],
                  }),
                },
              ],
            },
          ],
        },
      ],
      clusters: [
        {
          name: "picker",
          type: "STATIC",
          connect_timeout: "2s",
          // Envoy cannot go on without the picker once it has sent it a part of a body. So it must know before that the picker is away.
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
          load_assignment: {
            cluster_name: "picker",
            endpoints: [{ lb_endpoints: [endpointOf(`127.0.0.1:${pickerPort}`)] }],
          },
          typed_extension_protocol_options: {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
              "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
              { explicit_http_config: { http2_protocol_options: {} } },
            ),
          },
          transport_socket: {
            name: "envoy.transport_sockets.tls",
            // The picker's certificate is made at its start, so it is not verified.
            typed_config: typed("envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext", {
              // Envoy's health checks send no ALPN of their own.
              common_tls_context: { alpn_protocols: ["h2"] },
            }),
          },
        },
        {
          name: "decode",
          type: "STATIC",
          connect_timeout: "2s",
          typed_extension_protocol_options: {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
              "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
              {
                explicit_http_config: { http_protocol_options: {} },
                // Shorter than `kv-proxy` keeps its connections (75 s): a request on one that is being closed would fail.
                common_http_protocol_options: { idle_timeout: "60s" },
              },
            ),
          },
          load_assignment: {
            cluster_name: "decode",
            endpoints: [{ lb_endpoints: endpoints.map(endpointOf) }],
          },
          load_balancing_policy: {
            policies: [
              {
                typed_extension_config: {
                  name: "envoy.load_balancing_policies.override_host",
                  typed_config: typed(
                    "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
                    {
                      override_host_sources: [
                        { metadata: { key: "envoy.lb", path: [{ key: DESTINATION }] } },
                        { header: DESTINATION },
                      ],
                      fallback_policy: {
                        policies: [
                          {
                            typed_extension_config: {
                              name: "envoy.load_balancing_policies.round_robin",
                              typed_config: typed(
                                "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin",
                              ),
                            },
                          },
                        ],
                      },
                    },
                  ),
                },
              },
            ],
          },
        },
      ],
    },
  };
}
