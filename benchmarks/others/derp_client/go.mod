module derp_client

go 1.26

require tailscale.com v1.102.5
