"""What both adapters stand on."""
