const { readTransferConfig } = require("@kv/connector");

const { connector, role } = readTransferConfig(
  '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}',
);
console.log(connector, role);
