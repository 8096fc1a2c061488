# SPDX-License-Identifier: Apache-2.0
# The devstack plug-in of the Octavia amphora driver: devstack sources this file with a mode and a phase. The plug-in
# runs after that of Octavia, which creates the management network, its interface o-hm0 and the flavor m1.amphora.

function install_amphora_driver {
    install_package libpcre2-8-0
    setup_develop "$AMPHORA_DRIVER_DIR" driver,openstack,distributed
}

# The keys of the deployment. The processes run as the user of devstack.
function create_amphora_driver_keys {
    sudo install -d -o "$STACK_USER" -m 0750 "$AMPHORA_DRIVER_CONF_DIR"
    sudo install -d -o "$STACK_USER" -m 0770 "$AMPHORA_DRIVER_RUN_DIR"
    # systemd creates the directory of the sockets again at each boot.
    echo "d $AMPHORA_DRIVER_RUN_DIR 0770 $STACK_USER - -" | sudo tee /etc/tmpfiles.d/amphora-driver.conf >/dev/null
    (
        umask 077
        python=$(get_python_exec_prefix)/python3
        [[ -x "$python" ]] || python=python3
        "$python" - "$AMPHORA_DRIVER_CONF_DIR" <<'END'
import sys
from pathlib import Path
from cryptography.fernet import Fernet
from amphora_driver.certificates.ca import Authority, create_authority

folder = Path(sys.argv[1])
if not (folder / "encryption.keys").exists():
    certificate, key = create_authority("amphorae")
    (folder / "amphora_ca.pem").write_bytes(certificate)
    (folder / "amphora_ca.key").write_bytes(key.reveal())
    certificate, key = create_authority("controllers")
    (folder / "controller_ca.pem").write_bytes(certificate)
    client = Authority(certificate, key).issue_client("controller", 365)
    (folder / "controller.pem").write_bytes(client.bundle().reveal())
    (folder / "encryption.keys").write_bytes(Fernet.generate_key() + b"\n")
END
    )
}

function configure_amphora_driver {
    [[ "$DATABASE_TYPE" == mysql ]] || die $LINENO "The plug-in of the amphora driver supports DATABASE_TYPE=mysql only."
    create_amphora_driver_keys
    recreate_database "$AMPHORA_DRIVER_DATABASE"
    mysql -u"$DATABASE_USER" -p"$DATABASE_PASSWORD" -h"$MYSQL_HOST" \
        -e "ALTER DATABASE $AMPHORA_DRIVER_DATABASE CHARACTER SET utf8mb4;"

    (umask 077 && touch "$AMPHORA_DRIVER_CONF")
    iniset "$AMPHORA_DRIVER_CONF" amp_database connection "$BASE_SQL_CONN/$AMPHORA_DRIVER_DATABASE"
    iniset "$AMPHORA_DRIVER_CONF" amp_queue socket_dir "$AMPHORA_DRIVER_RUN_DIR"
    iniset "$AMPHORA_DRIVER_CONF" amp_controller loadbalancer_topology "$AMPHORA_DRIVER_TOPOLOGY"
    iniset "$AMPHORA_DRIVER_CONF" amp_network driver neutron
    iniset "$AMPHORA_DRIVER_CONF" amp_compute driver nova
    iniset "$AMPHORA_DRIVER_CONF" amp_compute_nova image_tag "$AMPHORA_DRIVER_IMAGE_TAG"
    iniset "$AMPHORA_DRIVER_CONF" amp_compute_nova flavor m1.amphora
    iniset "$AMPHORA_DRIVER_CONF" amp_octavia status_socket "$OCTAVIA_RUN_DIR/status.sock"
    iniset "$AMPHORA_DRIVER_CONF" amp_octavia stats_socket "$OCTAVIA_RUN_DIR/stats.sock"
    iniset "$AMPHORA_DRIVER_CONF" amp_octavia get_socket "$OCTAVIA_RUN_DIR/get.sock"
    iniset "$AMPHORA_DRIVER_CONF" amp_openstack deployment_id devstack
    iniset "$AMPHORA_DRIVER_CONF" amp_openstack octavia_config "$OCTAVIA_CONF"
    iniset "$AMPHORA_DRIVER_CONF" amp_openstack region_name "$REGION_NAME"

    add_to_list enabled_provider_drivers api_settings "haproxy: HAProxy and keepalived in amphorae" \
        "amphora: The Octavia Amphora driver."
    add_to_list enabled_provider_agents driver_agent haproxy ""
    if [[ "$(trueorfalse False AMPHORA_DRIVER_IS_DEFAULT)" == "True" ]]; then
        iniset "$OCTAVIA_CONF" api_settings default_provider_driver haproxy
    fi
}

# add_to_list OPTION GROUP ENTRY DEFAULT: adds an entry to a list of octavia.conf, whose default is used if it is empty.
function add_to_list {
    local present
    present=$(iniget "$OCTAVIA_CONF" "$2" "$1")
    present=${present:-$4}
    [[ "$present" == *"$3"* ]] || iniset "$OCTAVIA_CONF" "$2" "$1" "${present:+$present, }$3"
}

# After the plug-in of Octavia: the management network, the project of the image, and o-hm0 exist.
function init_amphora_driver {
    local network project address
    network=$(openstack network show lb-mgmt-net -f value -c id)
    project=$(openstack project show "$OCTAVIA_PROJECT_NAME" -f value -c id)
    address=$(iniget "$OCTAVIA_CONF" health_manager bind_ip)
    iniset "$AMPHORA_DRIVER_CONF" amp_compute_nova management_networks "$network"
    iniset "$AMPHORA_DRIVER_CONF" amp_compute_nova image_owner "$project"
    iniset "$AMPHORA_DRIVER_CONF" amp_health bind_port "$AMPHORA_DRIVER_HEALTH_PORT"
    [[ "$address" != *:* ]] || address="[$address]"
    iniset "$AMPHORA_DRIVER_CONF" amp_health targets "$address:$AMPHORA_DRIVER_HEALTH_PORT"
    [[ "$address" != *:* ]] || iniset "$AMPHORA_DRIVER_CONF" amp_health bind_address "::"
    pass_heartbeats
    upload_amphora_driver_image
    "$(get_python_exec_prefix)/amphoractl" database upgrade
}

# Heartbeats pass the security group of the port of o-hm0, and the firewall of this machine.
function pass_heartbeats {
    local kind=()
    [[ "$SERVICE_IP_VERSION" != 6 ]] || kind=(--ethertype IPv6 --remote-ip ::/0)
    openstack security group rule create --protocol udp --dst-port "$AMPHORA_DRIVER_HEALTH_PORT" "${kind[@]}" lb-health-mgr-sec-grp
    if sudo nft list chain inet octavia o-hm0-incoming >/dev/null 2>&1; then
        sudo nft insert rule inet octavia o-hm0-incoming iifname o-hm0 udp dport "$AMPHORA_DRIVER_HEALTH_PORT" accept
    elif [[ "$SERVICE_IP_VERSION" == 6 ]]; then
        sudo ip6tables -I INPUT -i o-hm0 -p udp --dport "$AMPHORA_DRIVER_HEALTH_PORT" -j ACCEPT
    else
        sudo iptables -I INPUT -i o-hm0 -p udp --dport "$AMPHORA_DRIVER_HEALTH_PORT" -j ACCEPT
    fi
}

function upload_amphora_driver_image {
    local file=$AMPHORA_DRIVER_IMAGE_FILE
    if [[ -n "$(openstack image list --name "$AMPHORA_DRIVER_IMAGE_NAME" -f value -c ID)" ]]; then
        return
    fi
    if [[ -z "$file" ]]; then
        sudo "$AMPHORA_DRIVER_DIR/diskimage/build" --name amphora-driver --directory "$DATA_DIR"
        file=$DATA_DIR/amphora-driver.qcow2
    fi
    openstack image create --project "$OCTAVIA_PROJECT_NAME" --private --disk-format qcow2 --container-format bare \
        --tag "$AMPHORA_DRIVER_IMAGE_TAG" --property hw_rng_model=virtio --file "$file" "$AMPHORA_DRIVER_IMAGE_NAME"
}

function start_amphora_driver {
    local prefix
    prefix=$(get_python_exec_prefix)
    # These processes of Octavia have started before the configuration was complete.
    sudo systemctl restart devstack@o-api.service devstack@o-da.service
    run_process amp-controller "$prefix/amphora-controller"
    run_process amp-health "$prefix/amphora-health-manager"
}

function stop_amphora_driver {
    stop_process amp-controller
    stop_process amp-health
}

if [[ "$1" == "stack" && "$2" == "install" ]]; then
    echo_summary "Installing the Octavia amphora driver"
    install_amphora_driver
elif [[ "$1" == "stack" && "$2" == "post-config" ]]; then
    echo_summary "Configuring the Octavia amphora driver"
    configure_amphora_driver
elif [[ "$1" == "stack" && "$2" == "extra" ]]; then
    echo_summary "Starting the Octavia amphora driver"
    init_amphora_driver
    start_amphora_driver
elif [[ "$1" == "unstack" ]]; then
    stop_amphora_driver
elif [[ "$1" == "clean" ]]; then
    stop_amphora_driver
    sudo rm -rf "$AMPHORA_DRIVER_CONF_DIR" "$AMPHORA_DRIVER_RUN_DIR" /etc/tmpfiles.d/amphora-driver.conf
fi
